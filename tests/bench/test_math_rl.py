"""Math-rl: rewards of sampled responses, losses on the same samples, evaluation, and what is said of what is wrong."""

import json
import warnings

import pytest
import tiny_math_rl as tiny
import torch

from moonopt import MOON
from moonopt.bench import find
from moonopt.bench.math_rl import SHOWN, USES_OF_VALUES, MathRL
from moonopt.bench.text import policy
from moonopt.bench.text.policy import Samples
from moonopt.bench.text.prompts import Problems
from moonopt.bench.text.rewards import RunningMean
from moonopt.errors import UserError

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:In an update all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("math") / "data")


def responses(*texts):
    """Samples with these words behind a prompt of one token."""
    rows = [[tiny.WORDS.index(word) for word in text] for text in texts]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [tiny.PAD] * (longest - len(row)) for row in rows])
    mask = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
    one = torch.ones(len(rows), 1)
    return Samples(8 * one.long(), one.bool(), tokens, mask)


THREE, FOUR = r"\boxed{3}", r"\boxed{4}"
ONE, TWO = "Step 1:", "Step 2:"


def test_a_response_is_rewarded_for_the_last_valid_box_its_length_and_its_steps(folder):
    made, _, _ = tiny.bench(folder)
    made.load_state_dict(made.state_dict() | {"running": {"total": 12, "count": 4}})
    given = responses(
        [ONE, "x", TWO, THREE, "<end>"],
        [FOUR, THREE],
        [THREE, FOUR, r"\boxed{}", r"\boxed{"],
        [ONE, TWO],
        [ONE, TWO, FOUR, "<end>"],
    )
    found = made._rewards(made._texts(given), given.lengths.tolist(), ["3"] * 5)
    assert found == [(1, 0, 1), (1, 1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 1)]


def test_responses_are_compared_with_the_mean_over_all_so_far_their_own_included(folder):
    made, splits, model = tiny.bench(folder)
    lengths = []
    for seed in range(3):
        found = tiny.rollout(made, splits, model, seed)
        lengths += found.samples.lengths.tolist()
        mean = sum(lengths) / len(lengths)
        assert made.state_dict()["running"] == {"total": sum(lengths), "count": 12 * (seed + 1)}
        assert found.rewards[:, 1].tolist() == [float(length < mean) for length in found.samples.lengths.tolist()]
    assert 0 < found.rewards[:, 1].mean() < 1


def test_every_prompt_has_its_samples_and_its_answer(folder):
    made, splits, model = tiny.bench(folder)
    batch = splits.train.batch(torch.arange(4), torch.Generator())
    found = tiny.rollout(made, splits, model)
    assert torch.equal(found.samples.prompt, batch.tokens.repeat_interleave(3, 0))
    answers = [answer for answer in batch.answers for _ in range(3)]
    texts = made._loaded.tokenizer.batch_decode(found.samples.response, skip_special_tokens=True)
    boxes = [[word for word in text.split() if word in (THREE, FOUR)] for text in texts]
    right = [float(bool(words) and words[-1] == rf"\boxed{{{answer}}}") for words, answer in zip(boxes, answers, strict=True)]
    assert found.rewards[:, 0].tolist() == right
    assert 0 < sum(right) < 12


def test_samples_come_from_the_generator_alone(folder):
    made, splits, model = tiny.bench(folder)
    first = tiny.rollout(made, splits, model)
    torch.manual_seed(99)
    again, other = tiny.rollout(made, splits, model), tiny.rollout(made, splits, model, seed=1)
    assert torch.equal(first.samples.response, again.samples.response)
    assert first.samples.response.shape != other.samples.response.shape or not torch.equal(
        *(each.samples.response for each in (first, other))
    )


def test_losses_are_the_missed_shares_and_have_the_gradients_of_reinforce(folder):
    made, splits, model = tiny.bench(folder)
    batch = tiny.rollout(made, splits, model)
    losses = made.losses(model, batch)
    missed = (1 - batch.rewards).sum(0)
    assert [loss.item() for loss in losses.values()] == pytest.approx(((missed + 1) / 14).tolist(), rel=1e-6)
    logits = model(
        input_ids=batch.samples.tokens,
        attention_mask=batch.samples.mask.long(),
        position_ids=policy.positions(batch.samples.mask),
    ).logits.double()
    width = batch.samples.prompt.shape[1]
    chosen = logits[:, width - 1 : -1].log_softmax(-1).gather(2, batch.samples.response[..., None])[..., 0]
    of_responses = (chosen * batch.samples.response_mask).sum(1)
    for number, loss in enumerate(losses.values()):
        others = (batch.rewards[:, number].sum() - batch.rewards[:, number]) / 11
        expected = -((batch.rewards[:, number] - others) * of_responses).mean()
        parameters = list(model.parameters())
        for one, other in zip(
            torch.autograd.grad(loss, parameters, retain_graph=True),
            torch.autograd.grad(expected, parameters, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_second_evaluation_is_on_the_same_samples(folder):
    made, splits, model = tiny.bench(folder)
    seen = []
    batch = tiny.rollout(made, splits, model)
    method = MOON(model, tasks=made.tasks, lr=0.01, beta=0.1)

    def losses(given):
        found = made.losses(model, given)
        seen.append({name: float(loss) for name, loss in found.items()})
        return found

    method.minimize(losses, batch)
    assert len(seen) == 2
    assert sum(seen[1].values()) < sum(seen[0].values())
    assert method.task_weights.max() > 1 / 3 + 1e-4


@pytest.mark.parametrize("delta", ["forward_mode", "double_backward"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_exact_deltas_are_those_of_a_backward_pass_per_task(delta, checkpointing, folder):
    found = []
    for mode in ("per_task", delta):
        made, splits, model = tiny.bench(folder, model__dtype="float64", model__checkpointing=checkpointing)
        method = MOON(model, tasks=made.tasks, lr=0.01, beta=0.1, delta=mode)
        method.minimize(lambda batch: made.losses(model, batch), tiny.rollout(made, splits, model))
        found.append((method.logits.clone(), [p.detach().clone() for p in model.parameters()]))
    assert found[0][0].abs().max() > 1e-3
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)  # Qwen3 has norms in float32, whatever its dtype
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other)


def test_checkpointed_layers_change_no_gradient_and_keep_fewer_activations(folder):
    gradients, kept = [], []
    for checkpointing in (False, True):
        made, splits, model = tiny.bench(folder, model__checkpointing=checkpointing)
        batch, sizes = tiny.rollout(made, splits, model), []
        with torch.autograd.graph.saved_tensors_hooks(lambda each: sizes.append(each.numel()) or each, lambda each: each):
            losses = made.losses(model, batch)
        gradients.append(torch.autograd.grad(sum(losses.values()), list(model.parameters())))
        kept.append(sum(sizes))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert kept[1] < kept[0] / 2


def test_dropout_has_no_say(tmp_path):
    made, splits, model = tiny.bench(tiny.write(tmp_path / "data", attention_dropout=0.5))
    batch = tiny.rollout(made, splits, model)
    first, again = (torch.stack(list(made.losses(model, batch).values())) for _ in range(2))
    assert torch.equal(first, again)
    missed = (1 - batch.rewards).sum(0)
    torch.testing.assert_close(first.detach(), (missed + 1) / 14)


def test_the_baseline_of_a_prompt_is_the_mean_of_its_other_samples(folder):
    made, _, _ = tiny.bench(folder, data__baseline="prompt")
    rewards = torch.tensor([[1.0, 0, 0], [0, 0, 1], [0, 0, 1], [1, 1, 1], [1, 0, 1], [1, 1, 0]])  # two prompts, three samples
    by_hand = torch.tensor([[1, 0, -1], [-0.5, 0, 0.5], [-0.5, 0, 0.5], [0, 0.5, 0.5], [0, -1, 0.5], [0, 0.5, -1]])
    torch.testing.assert_close(made._advantages(rewards), by_hand)


def test_the_penalty_pulls_towards_the_model_that_training_began_with(folder):
    plain, penalised = (tiny.bench(folder, data__kl=kl) for kl in (0.0, 0.5))
    for made, splits, model in (plain, penalised):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight += 0.2
        batch = tiny.rollout(made, splits, model)
        found = [float(loss) for loss in made.losses(model, batch).values()]
        if made is plain[0]:
            expected = found
    with torch.no_grad():
        now, then = (policy.response_log_probs(each, batch.samples) for each in (model, tiny.bench(folder)[2]))
    penalty = 0.5 * ((now - then) ** 2).sum() / (2 * batch.samples.response_mask.sum())
    assert penalty > 1e-3
    assert found == pytest.approx([each + float(penalty) for each in expected], rel=1e-5)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_rewards_without_spread_are_told_once_counted_and_leave_parameters_finite(reward, folder, monkeypatch):
    made, splits, model = tiny.bench(folder)
    monkeypatch.setattr(made, "_rewards", lambda texts, lengths, answers: [(reward,) * 3] * len(answers))
    before = [p.detach().clone() for p in model.parameters()]
    method = MOON(model, tasks=made.tasks, lr=0.01, vector_weight_decay=0.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(3):
            batch = tiny.rollout(made, splits, model, seed)
            losses = method.minimize(lambda given: made.losses(model, given), batch)
    texts = [str(each.message) for each in told if "nothing can be learned" in str(each.message)]
    assert [text.split(",")[0] for text in texts] == [
        f"In an update all 12 responses have {t} {reward:.0f}" for t in made.tasks
    ]
    assert [float(loss) for loss in losses.values()] == pytest.approx([(13 - 12 * reward) / 14] * 3)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    found = made.measured()
    assert [found[f"silent {task}"] for task in made.tasks] == [1, 1, 1]
    assert [found[task] for task in made.tasks] == [reward] * 3
    assert made.measured() == {}


def test_evaluation_is_of_the_likeliest_responses_and_learns_nothing(folder):
    made, splits, model = tiny.bench(folder)
    tiny.rollout(made, splits, model)
    state = made.state_dict()
    batches = [splits.valid.batch(torch.tensor(indices), torch.Generator()) for indices in ((0, 1, 2), (3,))]
    found, again = (made.evaluate(model, batches) for _ in range(2))
    assert found == again
    assert made.state_dict() == state
    assert len(made.examples()) == SHOWN
    assert set(found) == {metric.name for metric in made.metrics}
    lengths = []
    for batch in batches:
        for tokens, mask in zip(batch.tokens, batch.mask, strict=True):
            written = tokens[mask][None]
            for _ in range(8):
                written = torch.cat([written, model(input_ids=written).logits[:, -1].argmax(1)[:, None]], 1)
                if written[0, -1] == tiny.END:
                    break
            lengths.append(written.shape[1] - int(mask.sum()))
    assert found["length"] == sum(lengths) / 4
    assert found["reward"] == pytest.approx((found["accuracy"] + found["clarity"] + 1 - found["length"] / 8) / 3)


def test_shares_of_an_evaluation_are_counted(folder, monkeypatch):
    made, splits, model = tiny.bench(folder)
    made._running = RunningMean(12, 4)
    given = responses([ONE, TWO, THREE, "<end>"], [THREE, "<end>"], ["x"] * 8, [FOUR, "<end>"])
    monkeypatch.setattr(made, "_sample", lambda *arguments, **options: given)
    batch = splits.valid.batch(torch.arange(4), torch.Generator())
    batch = batch._replace(problems=[problem._replace(answer="3") for problem in batch.problems])
    assert made.evaluate(model, [batch]) == pytest.approx(
        {"accuracy": 0.5, "clarity": 0.25, "length": 4, "shorter": 0.5, "ended": 0.75, "reward": (0.5 + 0.25 + 0.5) / 3}
    )
    assert [example["given"] for example in made.examples()] == [problem._asdict() for problem in batch.problems]
    assert [example["made"]["rewarded for"] for example in made.examples()] == [
        "accuracy, clarity",
        "accuracy, conciseness",
        "nothing",
        "conciseness",
    ]
    assert [example["made"]["tokens"] for example in made.examples()] == ["4", "2", "8", "2"]
    assert made.examples()[2]["made"]["response"] == " ".join("x" * 8)


@pytest.mark.parametrize("method", [*USES_OF_VALUES, "si+muon", "moon"])
def test_methods_that_use_the_value_of_a_loss_are_refused_where_it_has_no_meaning(method):
    settings = {"data.loss": "surrogate", "optimizer.loss": "log" if method == "moon" else "plain"}
    with pytest.raises(UserError, match=rf"{method.replace('+', '.')} .*data.loss=surrogate .* use data.loss=shortfall"):
        MathRL(settings).check(method)
    MathRL(settings | {"data.loss": "shortfall"}).check(method)


@pytest.mark.parametrize("normalisation", ["loss", "loss+"])
def test_mgda_by_the_size_of_losses_is_refused_where_it_has_no_meaning(normalisation):
    settings = {"data.loss": "surrogate", "balancer.normalisation": normalisation}
    with pytest.raises(UserError, match=r"mgda\+muon with this balancer\.normalisation divides gradients by losses"):
        MathRL(settings).check("mgda+muon")
    MathRL(settings | {"balancer.normalisation": "l2"}).check("mgda+muon")


@pytest.mark.parametrize(("dtype", "rate", "told"), [("bfloat16", 1e-5, 1), ("bfloat16", 0.01, 0), ("float32", 1e-5, 0)])
def test_steps_that_would_be_lost_in_rounding_are_told(folder, dtype, rate, told, recwarn):
    tiny.bench(folder, model__dtype=dtype, optimizer__lr=rate)
    assert sum("lost in rounding" in str(each.message) for each in recwarn) == told


def test_a_tokenizer_that_makes_nothing_of_a_problem_is_refused(folder):
    _, splits, _ = tiny.bench(folder)
    with pytest.raises(UserError, match="makes no tokens of a problem"):
        Problems(splits.valid.problems, lambda text: {"input_ids": []}, "{question}")


@pytest.mark.parametrize("method", ["moon", "muon", "ls", "mgda", "nash-mtl+muon", "tiny_benchmarks:sgd"])
def test_methods_that_use_gradients_alone_may_have_surrogates(method):
    MathRL({"data.loss": "surrogate"}).check(method)


def test_surrogates_have_the_gradients_of_shortfalls(folder):
    gradients = []
    for loss in ("shortfall", "surrogate"):
        made, splits, model = tiny.bench(folder, data__loss=loss)
        losses = made.losses(model, tiny.rollout(made, splits, model))
        gradients.append(torch.autograd.grad(sum(losses.values()), list(model.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data__set": "math50"}, "Unknown data.set 'math50': expected one of math500, gsm8k. Did you mean"),
        ({"data__loss": "reward"}, "Unknown data.loss 'reward'"),
        ({"data__judge": "me"}, "Unknown data.judge 'me'"),
        ({"data__baseline": "none"}, "Unknown data.baseline 'none'"),
        ({"model__dtype": "int8"}, "Unknown model.dtype 'int8'"),
        ({"data__length": 0}, "data.length must be at least 1, found 0"),
        ({"data__samples": 0}, "data.samples must be at least 1, found 0"),
        ({"data__temperature": 0.0}, "data.temperature must be positive"),
        ({"data__kl": -1.0}, "data.kl must be at least 0"),
        ({"data__baseline": "prompt", "data__samples": 1}, "data.samples must be at least 2"),
        ({"data__prompt": "Solve it."}, "data.prompt must have {question} in it, found 'Solve it.'"),
        ({"data__samples": 1, "train__batch_size": 1}, "One response per update has nothing to be compared with"),
        ({"data__train_problems": 300}, "has 20 problems, and 300 [+] 4 [+] 4 are needed"),
        ({"data__length": 60}, "more than the model's context of 64: lower data.length"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, text, folder):
    with pytest.raises(UserError, match=text):
        tiny.bench(folder, **settings)


def test_a_line_that_is_no_json_is_named(tmp_path):
    place = tiny.write(tmp_path / "data") / "math500" / "test.jsonl"
    place.write_text(place.read_text() + '{"problem": "x", "ans')
    with pytest.raises(UserError, match=r"test\.jsonl, line 21: found no JSON"):
        tiny.bench(tmp_path / "data")


def test_a_tokenizer_without_padding_trains_all_the_same(tmp_path):
    data = tiny.write(tmp_path / "data", special={"eos_token": "<end>"})
    with pytest.warns(UserWarning, match="has no padding token"):
        made, splits, model = tiny.bench(data)
    batch = tiny.rollout(made, splits, model)
    assert batch.samples.response[~batch.samples.response_mask].eq(tiny.END).all()
    padded = tiny.rollout(*tiny.bench(tiny.write(tmp_path / "other")))
    assert torch.equal(batch.rewards, padded.rewards)
    assert torch.equal(batch.before, padded.before)


def test_what_is_missing_is_said(tmp_path):
    made = MathRL(tiny.SETTINGS)
    assert "Not in" in made.missing(tmp_path)
    data = tiny.write(tmp_path / "data")
    assert made.missing(data) is None
    (data / "tiny" / "model.safetensors").unlink()
    assert "has no weights" in made.missing(data)
    assert "moonopt data fetch smollm2" in MathRL().missing(data)
    assert MathRL(tiny.SETTINGS | {"model.folder": str(data / "tiny" / "absent")}).missing(data).startswith("There is no")


def test_gsm8k_has_the_counts_that_were_asked_for(folder, tmp_path):
    (tmp_path / "gsm8k").mkdir()
    for name, count in (("train", 30), ("test", 8)):
        records = [{"question": f"x {n}", "answer": f"so\n#### {n}"} for n in range(count)]
        (tmp_path / "gsm8k" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    chosen = {"data__set": "gsm8k", "model__folder": str(folder / "tiny")}
    _, splits, _ = tiny.bench(tmp_path, **chosen)
    assert [len(splits.train), len(splits.valid), len(splits.test)] == [12, 4, 4]
    with pytest.raises(UserError, match=r"There are 8 problems for data\.test_problems=9"):
        tiny.bench(tmp_path, data__test_problems=9, **chosen)


def test_it_is_found_by_its_name():
    assert find("math-rl") is MathRL
    assert MathRL.all_defaults()["train.steps_per_epoch"] == 10
