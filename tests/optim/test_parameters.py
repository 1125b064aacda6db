"""What is a matrix and what is a vector: every rule of the table, the user's own rules, and what groups are refused."""

import math
import re

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from moonopt import Muon, Split, route_parameters
from moonopt.optim.groups import check_group, check_kind, groups_of
from moonopt.optim.parameters import blocks


class Model(nn.Module):
    """Modules and parameters by name."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def parameter(*shape, **options):
    return nn.Parameter(torch.ones(shape), **options)


def kinds(params, **options):
    return {each.name: each.kind for each in route_parameters(params, **options).placements}


def reasons(params, **options):
    return {each.name: each.reason for each in route_parameters(params, **options).placements}


def parts(params, **options):
    """The rows of the parts of every matrix."""
    return {each.name: each.rows for each in route_parameters(params, **options).of_kind("matrix")}


def refused(text, error=ValueError):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def tied(first, second):
    """A model whose token embedding and language-model head, defined in this order, share their weight."""
    modules = {"wte": nn.Embedding(6, 4), "lm_head": nn.Linear(4, 6, bias=False)}
    modules["lm_head"].weight = modules["wte"].weight
    return Model(**{first: modules[first], "body": nn.Linear(4, 4, bias=False), second: modules[second]})


def everything():
    """A model with some of each."""
    return Model(
        embedding=nn.Embedding(5, 4),
        table=parameter(1, 3, 4),
        stem=nn.Conv2d(1, 4, 3),
        depthwise=nn.Conv2d(4, 4, 3, groups=4),
        layer=nn.TransformerEncoderLayer(4, 2, 8),
        lstm=nn.LSTM(4, 3),
        normed=parametrizations.spectral_norm(nn.Linear(4, 3)),
        head=nn.Linear(3, 2),
    )


# Linear maps


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(3, 4),
        nn.Conv1d(3, 4, 3),
        nn.Conv2d(3, 4, 3),
        nn.Conv3d(3, 4, 3),
        nn.ConvTranspose1d(3, 4, 3),
        nn.ConvTranspose2d(3, 4, 3),
        nn.ConvTranspose3d(3, 4, 3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_the_weight_of_a_linear_map_is_one_matrix_and_its_bias_a_vector(module):
    for model, prefix in ((module, ""), (nn.Sequential(module), "0.")):
        assert kinds(model) == {f"{prefix}weight": "matrix", f"{prefix}bias": "vector"}
        assert parts(model) == {f"{prefix}weight": None}


def test_a_subclass_of_a_linear_map_is_one_too():
    class Noisy(nn.Linear):
        pass

    assert kinds(Noisy(3, 4)) == {"weight": "matrix", "bias": "vector"}


def test_the_linear_map_of_transformers_is_known_by_its_class_name():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = parameter(3, 4), parameter(4)

    assert kinds(Conv1D()) == {"weight": "matrix", "bias": "vector"}
    assert reasons(Conv1D())["weight"] == "linear weight"


def test_a_convolution_of_one_input_channel_is_a_matrix():
    assert kinds(nn.Conv2d(1, 8, 3)) == {"weight": "matrix", "bias": "vector"}


@pytest.mark.parametrize(
    "module", [nn.Conv1d(4, 4, 3, groups=4), nn.Conv2d(4, 12, 3, groups=4), nn.ConvTranspose2d(4, 4, 3, groups=4)]
)
def test_a_depthwise_convolution_is_a_vector(module):
    assert kinds(module) == {"weight": "vector", "bias": "vector"}
    assert reasons(module)["weight"] == "depthwise convolution"


@pytest.mark.parametrize(
    ("module", "rows"),
    [
        (nn.Conv2d(4, 6, 3, groups=2), [3, 3]),
        (nn.Conv1d(6, 12, 3, groups=3), [4, 4, 4]),
    ],
)
def test_a_grouped_convolution_is_one_matrix_per_group(module, rows):
    assert parts(module) == {"weight": rows}
    assert reasons(module)["weight"] == f"convolution as (out, in * kernel), Split({len(rows)})"


def test_a_transposed_convolution_has_its_input_channels_as_rows():
    module = nn.ConvTranspose2d(4, 6, 3, groups=2)
    assert parts(module) == {"weight": [2, 2]}
    assert reasons(module)["weight"] == "transposed convolution as (in, out * kernel), Split(2)"


@pytest.mark.parametrize(("shape", "rows"), [((8, 24), [8, 8, 8]), ((8, 16), None)])
def test_a_fused_qkv_projection_is_three_matrices(shape, rows):
    assert parts(Model(qkv=nn.Linear(*shape, bias=False))).get("qkv.weight") == rows


def test_the_parts_of_a_grouped_convolution_are_the_weights_of_its_groups():
    grouped = nn.Conv2d(4, 6, 3, groups=2, bias=False)
    (placement,) = route_parameters(grouped).placements
    image = torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    first, second = blocks(grouped.weight, placement.rows)
    by_group = torch.cat([first @ image[0, :2].flatten(), second @ image[0, 2:].flatten()])
    torch.testing.assert_close(by_group, grouped(image).flatten())


# Attention and recurrence


def test_fused_attention_projections_are_three_matrices():
    model = nn.MultiheadAttention(4, 2)
    assert parts(model) == {"in_proj_weight": [4, 4, 4], "out_proj.weight": None}
    assert kinds(model)["in_proj_bias"] == kinds(model)["out_proj.bias"] == "vector"
    assert reasons(model)["in_proj_weight"] == "fused attention projections, Split(3)"


def test_attention_projections_of_different_widths_are_a_matrix_each():
    model = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True)
    assert parts(model) == dict.fromkeys(["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"])
    assert kinds(model)["bias_k"] == kinds(model)["bias_v"] == "vector"


@pytest.mark.parametrize(
    ("module", "matrices"),
    [
        (nn.LSTM(3, 4), {"weight_ih_l0": [4] * 4, "weight_hh_l0": [4] * 4}),
        (nn.GRU(3, 4), {"weight_ih_l0": [4] * 3, "weight_hh_l0": [4] * 3}),
        (nn.RNN(3, 4), {"weight_ih_l0": None, "weight_hh_l0": None}),
        (nn.LSTMCell(3, 4), {"weight_ih": [4] * 4, "weight_hh": [4] * 4}),
        (nn.GRUCell(3, 4), {"weight_ih": [4] * 3, "weight_hh": [4] * 3}),
        (nn.RNNCell(3, 4), {"weight_ih": None, "weight_hh": None}),
        (nn.LSTM(3, 4, proj_size=2), {"weight_ih_l0": [4] * 4, "weight_hh_l0": [4] * 4, "weight_hr_l0": None}),
        (
            nn.GRU(3, 4, num_layers=2, bidirectional=True),
            {f"weight_{what}_l{layer}{way}": [4] * 3 for layer in (0, 1) for way in ("", "_reverse") for what in ("ih", "hh")},
        ),
        (
            nn.LSTM(3, 4, proj_size=2, bidirectional=True),
            {
                f"weight_{what}_l0{way}": None if what == "hr" else [4] * 4
                for way in ("", "_reverse")
                for what in ("ih", "hh", "hr")
            },
        ),
    ],
    ids=str,
)
def test_recurrent_weights_are_one_matrix_per_gate_and_their_biases_vectors(module, matrices):
    assert parts(module) == matrices
    assert set(kinds(module)) - set(matrices) == {name for name, _ in module.named_parameters() if name.startswith("bias")}


def test_a_transformer_encoder_layer_has_its_projections_and_feed_forward_in_matrices():
    assert parts(nn.TransformerEncoderLayer(4, 2, 8)) == {
        "self_attn.in_proj_weight": [4, 4, 4],
        "self_attn.out_proj.weight": None,
        "linear1.weight": None,
        "linear2.weight": None,
    }


def test_multihead_attn_of_a_transformer_decoder_layer_is_no_head():
    assert parts(nn.TransformerDecoderLayer(4, 2, 8)) == {
        "self_attn.in_proj_weight": [4, 4, 4],
        "self_attn.out_proj.weight": None,
        "multihead_attn.in_proj_weight": [4, 4, 4],
        "multihead_attn.out_proj.weight": None,
        "linear1.weight": None,
        "linear2.weight": None,
    }


def test_a_head_inside_multihead_attn_is_still_a_head():
    assert kinds(Model(multihead_attn=Model(head=nn.Linear(3, 2, bias=False)))) == {"multihead_attn.head.weight": "vector"}


@pytest.mark.parametrize("name", ["multi_head_attn", "multi_head_attention"])
def test_multi_head_attention_with_an_underscore_is_no_head(name):
    assert kinds(Model(**{name: nn.Linear(4, 4, bias=False)})) == {f"{name}.weight": "matrix"}


# What is not a linear map


@pytest.mark.parametrize(
    "module",
    [nn.LayerNorm(4), nn.LayerNorm((3, 4)), nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)],
    ids=str,
)
def test_norms_are_vectors(module):
    assert set(kinds(module).values()) == {"vector"}


@pytest.mark.parametrize("module", [nn.Embedding(5, 4), nn.EmbeddingBag(5, 4)], ids=str)
def test_embeddings_are_vectors_whatever_they_are_called(module):
    assert kinds(Model(lookup=module)) == {"lookup.weight": "vector"}
    assert reasons(Model(lookup=module)) == {"lookup.weight": "embedding"}


def test_free_parameters_are_vectors():
    model = Model(cls_token=parameter(1, 1, 4), table=parameter(3, 4), mixing=parameter(4, 4), temperature=parameter())
    assert kinds(model) == dict.fromkeys(["cls_token", "table", "mixing", "temperature"], "vector")
    assert reasons(model)["mixing"] == "free parameter"


@pytest.mark.parametrize(
    "path", ["head", "heads.left", "classifier", "lm_head", "left_head", "Head", "net.classifier_2.0", "score", "logits"]
)
def test_prediction_heads_are_vectors_by_name(path):
    *outer, last = path.split(".")
    model = Model(**{last: nn.Linear(4, 4, bias=False)}) if last != "0" else nn.Sequential(nn.Linear(4, 4, bias=False))
    for name in reversed(outer):
        model = Model(**{name: model})
    assert kinds(model) == {f"{path}.weight": "vector"}
    assert reasons(model) == {f"{path}.weight": "prediction head, by name"}


@pytest.mark.parametrize("name", ["patch_embed", "patch_embedding", "to_patch_embedding", "conv_proj", "time_emb"])
@pytest.mark.parametrize("module", [nn.Conv2d(3, 8, 4, bias=False), nn.Linear(48, 8, bias=False)], ids=["conv", "linear"])
def test_patch_and_other_embeddings_are_vectors_by_name(name, module):
    assert kinds(Model(**{name: Model(proj=module)})) == {f"{name}.proj.weight": "vector"}
    assert reasons(Model(**{name: module})) == {f"{name}.weight": "embedding, by name"}


@pytest.mark.parametrize(
    "name", ["body", "hidden", "score_net", "positive", "member", "decoder", "conv_proj_q", "token_mixer", "position_wise"]
)
def test_other_names_say_nothing(name):
    assert kinds(Model(**{name: nn.Linear(4, 4, bias=False)})) == {f"{name}.weight": "matrix"}


# Parametrizations


def test_a_weight_under_spectral_norm_is_a_matrix():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)))
    assert kinds(model) == {"0.bias": "vector", "0.parametrizations.weight.original": "matrix"}
    assert reasons(model)["0.parametrizations.weight.original"] == "linear weight"


def test_a_weight_under_spectral_norm_is_a_matrix_when_its_layer_is_the_whole_model():
    model = parametrizations.spectral_norm(nn.Linear(3, 4))
    assert kinds(model) == {"bias": "vector", "parametrizations.weight.original": "matrix"}


def test_spectral_norm_does_not_change_what_a_layer_is():
    norm = parametrizations.spectral_norm
    lookup, head = norm(nn.Embedding(5, 4)), norm(nn.Linear(4, 2, bias=False))
    model = Model(lookup=lookup, head=head, lstm=norm(nn.LSTM(4, 3), "weight_hh_l0"))
    assert reasons(model)["lookup.parametrizations.weight.original"] == "embedding"
    assert reasons(model)["head.parametrizations.weight.original"] == "prediction head, by name"
    assert parts(model) == {"lstm.weight_ih_l0": [3] * 4, "lstm.parametrizations.weight_hh_l0.original": [3] * 4}


def test_the_parts_of_a_weight_under_weight_norm_are_vectors_and_train():
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2))
    lengths, directions = (f"0.parametrizations.weight.original{i}" for i in (0, 1))
    assert kinds(model)[lengths] == kinds(model)[directions] == "vector"
    assert parts(model) == {"2.weight": None}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Muon(model, lr=0.02, vector_lr=0.02)
    x, y = torch.randn(32, 4), torch.randn(32, 2)
    losses = [optimizer.minimize(lambda: (model(x) - y).square().mean(0)).mean().item() for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


# Tied and frozen parameters


@pytest.mark.parametrize("order", [("wte", "lm_head"), ("lm_head", "wte")])
def test_a_tied_embedding_counts_once_and_is_a_vector(order):
    model = tied(*order)
    assert kinds(model) == {f"{order[0]}.weight": "vector", "body.weight": "matrix"}
    assert kinds(model.named_parameters(), module=model) == kinds(model)
    assert route_parameters(model).matrix_share == 16 / (24 + 16)


@pytest.mark.parametrize("order", [("lookup", "out"), ("out", "lookup")])
def test_a_weight_tied_to_an_embedding_is_a_vector_whatever_the_names_say(order):
    modules = {"lookup": nn.Embedding(6, 4), "out": nn.Linear(4, 6, bias=False)}
    modules["out"].weight = modules["lookup"].weight
    model = Model(**{name: modules[name] for name in order})
    assert kinds(model) == {f"{order[0]}.weight": "vector"}
    assert reasons(model) == {f"{order[0]}.weight": "embedding"}


def test_two_linear_maps_that_share_a_weight_are_one_matrix():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    assert kinds(nn.Sequential(first, second)) == {"0.weight": "matrix"}


@pytest.mark.parametrize("order", [("body", "head"), ("head", "body")])
def test_a_module_that_is_also_a_head_is_a_vector(order):
    shared = nn.Linear(4, 4, bias=False)
    assert kinds(Model(**dict.fromkeys(order, shared))) == {f"{order[0]}.weight": "vector"}


def test_a_weight_that_its_module_has_under_two_names_is_a_vector_by_the_second():
    layer = nn.Linear(4, 4, bias=False)
    layer.token_table = layer.weight
    assert kinds(layer) == {"weight": "vector"}


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))
    model[1].bias.requires_grad_(False)
    assert kinds(model) == {"1.weight": "matrix"}
    assert kinds(model.named_parameters()) == {"1.weight": "matrix"}
    assert route_parameters(model).matrix_share == 1.0


# Names without modules, and wrapped modules


@pytest.mark.parametrize(
    ("name", "shape", "kind", "rows"),
    [
        ("layers.0.weight", (3, 4), "matrix", None),
        ("layers.0.bias", (3,), "vector", None),
        ("scale", (), "vector", None),
        ("tok_embed.weight", (10, 4), "vector", None),
        ("wte.weight", (10, 4), "matrix", None),  # nothing in name or shape tells
        ("lm_head.weight", (10, 4), "vector", None),
        ("attn.in_proj_weight", (12, 4), "matrix", [4, 4, 4]),
        ("multihead_attn.in_proj_weight", (12, 4), "matrix", [4, 4, 4]),
        ("attn.bias_k", (1, 1, 4), "vector", None),
        ("conv.weight", (4, 3, 3, 3), "matrix", None),
        ("conv.weight", (4, 1, 3, 3), "vector", None),
        ("conv.weight", (1, 4, 3), "vector", None),
        ("table", (2, 16, 4), "vector", None),
    ],
)
def test_without_a_module_name_and_shape_decide(name, shape, kind, rows):
    (placement,) = route_parameters([(name, parameter(*shape))]).placements
    assert (placement.kind, placement.rows) == (kind, rows)


def test_with_the_module_named_parameters_are_routed_as_the_module_is():
    model = everything()
    assert route_parameters(model.named_parameters(), module=model) == route_parameters(model)
    assert kinds(model.named_parameters()) != kinds(model)


def test_named_parameters_keep_the_names_that_were_given():
    model = nn.Embedding(5, 4)
    assert kinds([("renamed", model.weight)], module=model) == {"renamed": "vector"}


def test_parameters_that_the_module_does_not_own_are_routed_by_name_and_shape():
    stranger = nn.Linear(3, 4)
    assert reasons(stranger.named_parameters(), module=nn.Linear(3, 4))["weight"] == "two dimensions"


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda model: torch.compile(model, backend="eager"), "_orig_mod."),
        (lambda model: Model(module=model), "module."),
        (lambda model: Model(module=torch.compile(model, backend="eager")), "module._orig_mod."),
    ],
    ids=["compiled", "parallel", "parallel compiled"],
)
def test_a_wrapped_model_is_routed_as_the_model_is(wrap, prefix):
    model = everything()
    wrapped = wrap(model)
    expected = {prefix + name: reason for name, reason in reasons(model).items()}
    assert reasons(wrapped) == expected
    assert reasons(wrapped.named_parameters(), module=wrapped) == expected
    by_name = {prefix + name: reason for name, reason in reasons(model.named_parameters()).items()}
    assert reasons(wrapped.named_parameters()) == by_name
    rules = {"head.weight": "matrix", "layer.linear1": "vector"}
    ruled = reasons(wrapped, rules=rules)
    assert ruled[f"{prefix}head.weight"] == "rules['head.weight']"
    assert ruled[f"{prefix}layer.linear1.weight"] == "rules['layer.linear1']"


def test_rules_hold_in_a_compiled_parallel_model():
    model = torch.compile(Model(module=Model(body=nn.Linear(3, 4, bias=False))), backend="eager")
    assert kinds(model, rules={"body.weight": "vector"}) == {"_orig_mod.module.body.weight": "vector"}


# The user's rules


def two_layers():
    return Model(encoder=nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6)), head=nn.Linear(6, 2))


def test_a_rule_for_an_exact_name_places_that_parameter_alone():
    expected = kinds(two_layers()) | {"encoder.0.weight": "vector"}
    assert kinds(two_layers(), rules={"encoder.0.weight": "vector"}) == expected
    assert reasons(two_layers(), rules={"encoder.0.weight": "vector"})["encoder.0.weight"] == "rules['encoder.0.weight']"


def test_a_rule_with_a_pattern_places_all_that_match():
    assert set(kinds(two_layers(), rules={"*.weight": "matrix"}).items()) >= {
        ("encoder.0.weight", "matrix"),
        ("encoder.1.weight", "matrix"),
        ("head.weight", "matrix"),
    }
    assert set(kinds(two_layers(), rules={"encoder.?.weight": "vector"}).values()) == {"vector"}


def test_a_rule_for_a_module_places_its_weight_and_leaves_its_bias_a_vector():
    found = kinds(two_layers(), rules={"head": "matrix"})
    assert (found["head.weight"], found["head.bias"]) == ("matrix", "vector")
    assert reasons(two_layers(), rules={"head": "matrix"})["head.bias"] == "fewer than two dimensions"


def test_a_rule_for_a_module_reaches_all_modules_in_it():
    assert set(kinds(two_layers(), rules={"encoder": "vector"}).values()) == {"vector"}
    assert parts(two_layers(), rules={"encoder.?": Split(2)}) == {"encoder.0.weight": [3, 3], "encoder.1.weight": [3, 3]}


def test_a_rule_for_a_module_does_not_reach_one_whose_name_only_begins_so():
    model = Model(block=nn.Linear(3, 3, bias=False), block2=nn.Linear(3, 3, bias=False))
    assert kinds(model, rules={"block": "vector"}) == {"block.weight": "vector", "block2.weight": "matrix"}


def test_a_rule_with_a_split_makes_several_matrices():
    rules = {"encoder.0.weight": Split(1, 2, 3), "encoder.1.weight": Split(2)}
    assert parts(two_layers(), rules=rules) == {"encoder.0.weight": [1, 2, 3], "encoder.1.weight": [3, 3]}
    assert reasons(two_layers(), rules=rules)["encoder.0.weight"] == "rules['encoder.0.weight'], Split(1, 2, 3)"


def test_a_rule_for_matrix_undoes_the_split_of_the_table():
    assert parts(nn.MultiheadAttention(4, 2), rules={"in_proj_weight": "matrix"})["in_proj_weight"] is None


def test_the_first_rule_that_matches_wins():
    specific, general = ("encoder.0.weight", "vector"), ("encoder", "matrix")
    model = Model(encoder=nn.Sequential(nn.Linear(4, 6), nn.Embedding(6, 4)))
    assert kinds(model, rules=dict([specific, general]))["encoder.0.weight"] == "vector"
    assert kinds(model, rules=dict([specific, general]))["encoder.1.weight"] == "matrix"
    assert kinds(model, rules={"encoder.*.weight": "matrix", "encoder": "vector"})["encoder.0.weight"] == "matrix"


def test_rules_hold_for_named_parameters_too():
    model = two_layers()
    for module in (None, model):
        assert kinds(model.named_parameters(), rules={"head.weight": "matrix"}, module=module)["head.weight"] == "matrix"


def test_a_rule_that_matches_nothing_is_an_error_that_names_the_nearest_parameter():
    with refused(
        "Unknown parameter in rules 'a.weihgt': expected one of a.weight, a.bias. Did you mean 'a.weight'? "
        "print(moonopt.route_parameters(model)) shows their names."
    ):
        route_parameters(Model(a=nn.Linear(3, 4)), {"a.weihgt": "vector"})


def test_a_rule_that_matches_nothing_in_a_large_model_names_the_nearest_parameter_alone():
    with refused(
        "Unknown parameter in rules '7.wieght'. Did you mean '7.weight'? "
        "print(moonopt.route_parameters(model)) shows their names."
    ):
        route_parameters(nn.Sequential(*(nn.Linear(2, 2) for _ in range(11))), {"7.wieght": "vector"})


def test_a_rule_behind_a_wider_one_is_not_called_unknown():
    try:
        route_parameters(nn.Sequential(nn.Linear(3, 4)), {"0": "vector", "0.weight": "matrix"})
    except ValueError as error:
        assert "Unknown" not in str(error)  # noqa: PT017 -- whether it is an error at all is not decided here


@pytest.mark.parametrize("placing", ["matrix", Split(2)])
@pytest.mark.parametrize("pattern", ["encoder.0.bias", "*.bias"])
def test_a_rule_that_makes_a_bias_a_matrix_is_an_error(pattern, placing):
    text = f"rules[{pattern!r}] makes 'encoder.0.bias' a matrix, but its shape is (6,): a matrix has at least two dimensions."
    with refused(text):
        route_parameters(two_layers(), {pattern: placing})


@pytest.mark.parametrize("placing", ["matrices", "Matrix", None, 3, ["matrix"]])
def test_a_rule_with_another_value_is_an_error(placing):
    with refused(f'rules[\'head\'] must be "matrix", "vector" or Split(...), found {placing!r}.'):
        route_parameters(two_layers(), {"head": placing})


def test_a_rule_with_a_split_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=re.escape("Split(4) asks for 4 equal parts, the parameter has 6 rows.")):
        route_parameters(two_layers(), {"encoder.0.weight": Split(4)})


# Split


def test_split_into_equal_parts_and_into_parts_of_given_rows():
    assert Split(3).rows(12) == [4, 4, 4]
    assert Split(1).rows(5) == [5]
    assert Split(8, 2, 2).rows(12) == [8, 2, 2]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(1, 9))
def test_split_parts_are_what_was_asked_for_and_make_up_the_whole(sizes, each):
    assert Split(*sizes).rows(sum(sizes)) == sizes
    assert Split(len(sizes)).rows(len(sizes) * each) == [each] * len(sizes)


def test_split_parts_that_do_not_make_up_the_rows_are_refused():
    with refused("Split(2, 3) has 5 rows in all, the parameter 6."):
        Split(2, 3).rows(6)


def test_split_into_equal_parts_that_do_not_divide_the_rows_is_refused():
    with refused("Split(3) asks for 3 equal parts, the parameter has 10 rows."):
        Split(3).rows(10)


@pytest.mark.parametrize("sizes", [(), (0,), (-1,), (2, 0), (2.0,), ("2",)])
def test_split_needs_positive_numbers(sizes):
    with refused(f"Split needs positive numbers, found {sizes}."):
        Split(*sizes)


def test_splits_are_equal_when_their_sizes_are():
    assert Split(2, 3) == Split(2, 3)
    assert len({Split(2, 3), Split(2, 3), Split(3, 2), Split(5)}) == 3
    assert Split(2, 3) != Split(3, 2)
    assert Split(3) != 3
    assert repr(Split(2, 3)) == "Split(2, 3)"


# The report


def test_the_report_gives_name_shape_kind_and_reason_and_the_share():
    model = Model(
        temperature=parameter(),
        embed=nn.Embedding(5, 4),
        conv=nn.Conv2d(4, 6, 3, groups=2, bias=False),
        attn=nn.MultiheadAttention(4, 2, bias=False),
        head=nn.Linear(4, 2),
    )
    assert str(route_parameters(model, {"attn.out_proj.weight": Split(2)})) == "\n".join(
        [
            "temperature           scalar   vector  fewer than two dimensions",
            "embed.weight          5x4      vector  embedding",
            "conv.weight           6x2x3x3  matrix  convolution as (out, in * kernel), Split(2)",
            "attn.in_proj_weight   12x4     matrix  fused attention projections, Split(3)",
            "attn.out_proj.weight  4x4      matrix  rules['attn.out_proj.weight'], Split(2)",
            "head.weight           2x4      vector  prediction head, by name",
            "head.bias             2        vector  fewer than two dimensions",
            "84.73% of 203 parameters are in matrices",
        ]
    )


def test_the_report_of_a_large_model_groups_the_digits_of_its_size():
    assert repr(route_parameters(nn.Linear(100, 10, bias=False))).endswith("\n100.00% of 1,000 parameters are in matrices")


def test_the_matrix_share_is_that_of_all_trainable_numbers():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5))
    convolution, convolution_bias, norm, linear, linear_bias = 4 * 2 * 3 * 3, 4, 2 * 4, 4 * 5, 5
    total = convolution + convolution_bias + norm + linear + linear_bias
    assert route_parameters(model).matrix_share == (convolution + linear) / total


def test_the_matrix_share_of_nothing_is_zero():
    assert route_parameters(nn.ReLU()).matrix_share == 0.0
    assert route_parameters(nn.Linear(3, 4).requires_grad_(False)).matrix_share == 0.0


# Blocks


def test_the_block_of_a_matrix_is_itself():
    matrix = torch.randn(3, 4)
    (block,) = blocks(matrix, None)
    assert block is matrix


def test_the_block_of_a_convolution_has_a_row_per_output():
    weight = torch.randn(6, 2, 3, 5)
    (block,) = blocks(weight, None)
    assert block.shape == (6, 2 * 3 * 5)
    assert torch.equal(block[4], weight[4].flatten())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([(3,), (2, 3), (2, 1, 2)]))
def test_blocks_are_the_rows_of_the_parts_one_below_the_other(rows, rest):
    tensor = torch.arange(float(sum(rows) * math.prod(rest))).reshape(sum(rows), *rest)
    found = blocks(tensor, rows)
    assert [block.shape for block in found] == [(count, math.prod(rest)) for count in rows]
    assert torch.equal(torch.cat(found), tensor.flatten(1))


# Groups


def complete(parameters, **settings):
    """A parameter group with all settings."""
    defaults = {"kind": "matrix", "rows": [None] * len(parameters), "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
    return defaults | {"scale": "none", "betas": (0.9, 0.999), "eps": 1e-8, "params": parameters} | settings


def test_a_module_becomes_a_group_of_matrices_and_one_of_vectors():
    model = nn.MultiheadAttention(4, 2)
    matrices, vectors = groups_of(model, None, None)
    assert (matrices["kind"], vectors["kind"]) == ("matrix", "vector")
    assert [name for name, _ in matrices["params"]] == ["in_proj_weight", "out_proj.weight"]
    assert [name for name, _ in vectors["params"]] == ["in_proj_bias", "out_proj.bias"]
    assert (matrices["rows"], vectors["rows"]) == ([[4, 4, 4], None], [None, None])
    assert matrices["params"][0][1] is model.in_proj_weight


def test_a_kind_that_does_not_occur_makes_no_group():
    assert [group["kind"] for group in groups_of(nn.LayerNorm(3), None, None)] == ["vector"]
    assert [group["kind"] for group in groups_of(nn.Linear(3, 4, bias=False), None, None)] == ["matrix"]


def test_named_parameters_become_groups_by_name_or_by_module():
    model = Model(wte=nn.Embedding(5, 4))
    assert [group["kind"] for group in groups_of(model.named_parameters(), None, None)] == ["matrix"]
    assert [group["kind"] for group in groups_of(model.named_parameters(), None, model)] == ["vector"]


def test_rules_reach_the_groups():
    assert groups_of(nn.Linear(3, 4, bias=False), {"weight": Split(2)}, None)[0]["rows"] == [[2, 2]]


def test_given_groups_are_kept_as_they_are_and_the_callers_are_not_touched():
    given = [{"params": [parameter(2, 2)], "kind": "matrix", "lr": 0.1}]
    (group,) = groups_of(given, None, None)
    assert group == given[0]
    assert group is not given[0]


def test_rules_with_groups_are_refused():
    with refused("rules= needs names: pass the module or its named_parameters() instead of groups."):
        groups_of([{"params": [parameter(2, 2)], "kind": "matrix"}], {"weight": "vector"}, None)


@pytest.mark.parametrize(
    ("params", "found"),
    [
        (lambda: nn.Linear(3, 4).parameters(), "a bare Parameter"),
        (lambda: [torch.ones(2, 2)], "a bare Tensor"),
    ],
    ids=["parameters", "tensor"],
)
def test_bare_tensors_are_refused_with_the_reason(params, found):
    text = (
        f"Expected a model or its named_parameters(), found {found}: without its name and module a parameter cannot be told "
        "to be a matrix or a vector. Pass the model itself, or named_parameters() with module=model, or groups with a kind."
    )
    with refused(text):
        groups_of(params(), None, None)
    with refused(text):
        Muon(params())


@pytest.mark.parametrize(("group", "found"), [({}, "None"), ({"kind": None}, "None"), ({"kind": "matrices"}, "'matrices'")])
def test_a_group_without_a_kind_is_refused_with_the_reason(group, found):
    text = (
        f'A parameter group needs kind="matrix" or kind="vector", found {found}: by its shape a matrix cannot be told from '
        "an embedding. Pass the model itself to have rules tell them apart, or named_parameters() in each group and "
        "module=model."
    )
    with refused(text):
        check_kind(group)
    with refused(text):
        Muon([{"params": [parameter(2, 2)]} | group])


@pytest.mark.parametrize("kind", ["matrix", "vector"])
def test_a_complete_group_passes(kind):
    check_kind({"kind": kind})
    check_group(complete([parameter(4, 3), parameter(2, 3, 1)], kind=kind))
    check_group(complete([parameter(4, 3)], rows=[[1, 3]], lr=0, momentum=0, weight_decay=0.1, scale="rms"))
    check_group(complete([parameter(4, 3)], lr=torch.tensor(0.1)))


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_a_negative_setting_is_refused(name, value):
    with refused(f"{'vector_eps' if name == 'eps' else name} must be a number of at least 0, found {value}."):
        check_group(complete([parameter(2, 2)], **{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("momentum", 1.0, "momentum must be a number of at least 0 and below 1, found 1.0."),
        ("momentum", -0.1, "momentum must be a number of at least 0 and below 1, found -0.1."),
        ("betas", (0.9, 1.0), "vector_betas must be a number of at least 0 and below 1, found 1.0."),
        ("betas", (-0.1, 0.9), "vector_betas must be a number of at least 0 and below 1, found -0.1."),
    ],
)
def test_an_average_that_would_never_move_is_refused(name, value, text):
    with refused(text):
        check_group(complete([parameter(2, 2)], **{name: value}))


def test_an_unknown_scale_is_refused_with_the_nearest_name():
    with refused("Unknown scale 'spectrall': expected one of none, spectral, rms. Did you mean 'spectral'?"):
        check_group(complete([parameter(2, 2)], scale="spectrall"))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_matrix_of_fewer_than_two_dimensions_is_refused(shape):
    with refused(f"A matrix has at least two dimensions, found a parameter of shape {shape}."):
        check_group(complete([parameter(2, 2), parameter(*shape)]))
    check_group(complete([parameter(*shape)], kind="vector"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
@pytest.mark.parametrize("kind", ["matrix", "vector"])
def test_a_parameter_that_is_not_real_floating_point_is_refused(dtype, kind):
    odd = nn.Parameter(torch.ones(2, 2, dtype=dtype), requires_grad=False)
    with refused(f"Parameters must be real floating point, found one of {dtype}."):
        check_group(complete([odd], kind=kind))


def test_parts_that_do_not_make_up_a_parameter_are_refused():
    with refused("The parts [1, 2] do not make up the 4 rows of a parameter."):
        check_group(complete([parameter(4, 3)], rows=[[1, 2]]))


def test_the_optimizer_refuses_what_the_checks_refuse():
    with refused("momentum must be a number of at least 0 and below 1, found 1.0."):
        Muon(nn.Linear(3, 4), momentum=1.0)
    with refused("lr must be a number of at least 0, found -0.1."):
        Muon(nn.Linear(3, 4), lr=-0.1)
    with refused("A matrix has at least two dimensions, found a parameter of shape (4,)."):
        Muon([{"params": list(nn.Linear(3, 4).parameters()), "kind": "matrix"}])
