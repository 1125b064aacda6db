"""An optimizer around another one, with whose groups and state schedulers, scalers and checkpoints work."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from moonopt.balance.base import Memory
from moonopt.tasks.verbs import TaskOptimizer

#: What torch's optimizers keep in the shape of a parameter.
LIKE_PARAMETERS = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "variance"),
)


class Wrapper(TaskOptimizer):
    """What is the inner optimizer's."""

    optimizer: Optimizer
    _module: nn.Module | None

    def is_setting(self, name: str) -> bool:
        inner = self.optimizer.is_setting(name) if isinstance(self.optimizer, TaskOptimizer) else super().is_setting(name)
        return inner and not name.startswith(Memory.PREFIX)

    def known_module(self) -> nn.Module | None:
        inner = self.optimizer.known_module() if isinstance(self.optimizer, TaskOptimizer) else None
        return inner if self._module is None else self._module

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def prepare_for_capture(self) -> None:
        if isinstance(self.optimizer, TaskOptimizer):
            self.optimizer.prepare_for_capture()
        else:
            _make_capturable(self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_load_state_dict_post_hook(hook, prepend)

    def _load_inner(self, state_dict: dict[str, Any]) -> None:
        _check_shapes(self.optimizer, state_dict)
        capturable = [group.get("capturable") for group in self.param_groups]
        self.optimizer.load_state_dict(state_dict)
        for group, flag in zip(self.param_groups, capturable, strict=True):
            if flag is not None:  # a matter of this process: a checkpoint of a GPU may go on on a CPU
                group["capturable"] = flag

    def _parameters(self) -> list[Tensor]:
        return [p for p in self._trained() if p.requires_grad]


def check_usable(optimizer: Optimizer) -> None:
    """Raise where an optimizer cannot take the gradient that a balancer leaves."""
    name = type(optimizer).__name__
    if hasattr(optimizer, "task_weights"):
        raise ValueError(f"{name} weighs tasks by itself: balance torch's optimizers or moonopt.Muon.")
    if isinstance(optimizer, LBFGS):
        raise ValueError(f"{name} evaluates the losses as often as it likes, which no balancer can follow: use another one.")


def _check_shapes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise where a checkpoint is of a model of another size: a fused optimizer of torch would write beyond its state."""
    if not type(optimizer).__module__.startswith("torch.optim"):  # others may keep what they like
        return
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=False):  # of their number torch tells
        for p, key in zip(group["params"], saved_group["params"], strict=False):
            for name, value in saved["state"].get(key, {}).items():
                if name in LIKE_PARAMETERS and isinstance(value, Tensor) and value.shape != p.shape:
                    raise ValueError(f"The checkpoint's {name} has shape {tuple(value.shape)}, expected {tuple(p.shape)}.")


def _make_capturable(optimizer: Optimizer) -> None:
    """One of torch's then keeps its number of steps, and what else is one number, on the device."""
    for group in optimizer.param_groups:
        group["capturable"] = True
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            numbers = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.ndim == 0}
            state |= {name: value.to(p.device) for name, value in numbers.items()}
