"""The same numbers on all ranks."""

from torch import Tensor, distributed


def world_size() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def mean_over_ranks(numbers: Tensor) -> Tensor:
    """The mean over all processes, equal on each of them."""
    if world_size() == 1:
        return numbers
    total = numbers.detach().clone()
    distributed.all_reduce(total)
    return total / world_size()


def refuse_several_ranks(text: str) -> None:
    """Raise where there is more than one process."""
    if world_size() > 1:
        raise RuntimeError(f"{text}: found a world of {world_size()} processes, expected one.")
