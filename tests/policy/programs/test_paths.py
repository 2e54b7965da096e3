"""Name stacks as module paths, and paths as reports print them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policy.programs import paths
from policy.programs.jaxprs import equations_within


@pytest.fixture(autouse=True)
def no_names():
    paths.forget()
    yield
    paths.forget()


@pytest.mark.parametrize(
    ("stack", "path"),
    [
        ("", ()),
        ("Net", ("Net",)),
        ("Net/encoder/Dense_0", ("Net", "encoder", "Dense_0")),
        ("jvp(Net)/Dense_0", ("Net", "Dense_0")),
        ("transpose(jvp(Net))/encoder/Dense_0", ("Net", "encoder", "Dense_0")),
        ("vmap(Net)/Dense_0", ("Net", "Dense_0")),
        ("Net/checkpoint/Dense_0", ("Net", "Dense_0")),
        ("Net/Dense_0.__call__", ("Net", "Dense_0")),
        ("Net/Dense_0/Dense_0", ("Net", "Dense_0")),  # its call calls its base class's
        ("Net.encode/encoder", ("Net", "encoder")),
        ("jit(step)/Net/head", ("Net", "head")),
        ("Net/bij,bjk->bik/head", ("Net", "head")),
        ("Net/<lambda>/head", ("Net", "head")),
        ("Net/jvp(Net)/head", ("Net", "head")),  # a derivative begins at the root
        ("attn/softmax", ("attn", "softmax")),
    ],
)
def test_a_name_stack_is_a_path(stack, path):
    assert paths.path_of(stack) == path


@pytest.mark.parametrize(
    ("stack", "above", "path"),
    [
        ("", ("Net", "block"), ("Net", "block")),
        ("Dense_0", ("Net", "block"), ("Net", "block", "Dense_0")),
        ("block/Dense_0", ("Net", "block"), ("Net", "block", "Dense_0")),
        ("Net/block/Dense_0", ("Net", "block"), ("Net", "block", "Dense_0")),
        ("transpose(jvp())", ("Net", "block"), ("Net", "block")),
    ],
)
def test_the_names_in_a_body_are_relative_to_its_equation(stack, above, path):
    assert paths.path_of(stack, above) == path


def test_a_noted_name_may_hold_dots_and_slashes():
    assert paths.path_of("Net/v1.block/x") == ("Net", "v1", "x")
    before = paths.noted()
    paths.note("v1.block")
    paths.note("blocks/0")
    assert paths.noted() > before
    assert paths.path_of("Net/v1.block/x") == ("Net", "v1.block", "x")
    assert paths.path_of("Net/blocks/0/x") == ("Net", "blocks", "0", "x")


def test_a_repeated_name_is_two_modules_where_it_was_noted():
    assert paths.path_of("Net/Dense_0/Dense_0") == ("Net", "Dense_0")
    paths.note_repeated(("Net", "block", "block"))
    assert paths.once(("block", "block")) == ("block", "block")
    assert paths.once(("head", "head", "x")) == ("head", "x")
    assert paths.once(("layers", "0", "0")) == ("layers", "0", "0")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("Net", "encoder", "layer_0"), "encoder/layer_0"),
        (("Net",), "Net:"),
        (("encoder", "layer_0"), "encoder/layer_0"),
        (("train", "Net", "head"), "head"),
        ((), ""),
    ],
)
def test_reports_print_paths_below_the_model(path, text):
    if path[:1] == ("train",):
        paths.note_root("Net")
    assert paths.spelled(path) == text


def test_models_are_named_where_a_program_has_two():
    with paths.naming([("Net", "head"), ("Critic", "head")]):
        assert paths.spelled(("Net", "head")) == "Net:head"
    with paths.naming([("Net", "head"), ("Net", "body")]):
        assert paths.spelled(("Net", "head")) == "head"
    assert paths.parts_of("Net:encoder/layer_0") == ["Net:", "encoder", "layer_0"]
    assert paths.parts_of("encoder/layer_0") == ["encoder", "layer_0"]


@pytest.mark.parametrize(
    ("texts", "folded"),
    [
        (["layers/0/norm", "layers/1/norm", "layers/2/norm"], ["layers/0..2/norm"]),
        (["Dense_0", "Dense_1", "Dense_2"], ["Dense_0..2"]),
        (["Dense_0", "Dense_1"], ["Dense_0", "Dense_1"]),
        (["Dense_0", "Dense_2", "Dense_4"], ["Dense_0", "Dense_2", "Dense_4"]),
        (["head", "head"], ["head"]),
        (
            [f"block_{i}/Dense_{j}" for i in range(3) for j in range(3)],
            ["block_0..2/Dense_0..2"],
        ),
    ],
)
def test_paths_that_differ_in_a_number_are_one(texts, folded):
    assert paths.folded(texts) == folded


def test_the_path_of_a_loops_body_is_what_its_equations_share():
    def step(carry, _):
        with jax.named_scope("block"):
            with jax.named_scope("up"):
                carry = jnp.sin(carry)
            with jax.named_scope("down"):
                carry = jnp.cos(carry)
        return carry, None

    jaxpr = jax.make_jaxpr(lambda x: lax.scan(step, x, None, length=2)[0])(1.0)
    (scan,) = (e for e in equations_within(jaxpr.jaxpr) if e.primitive.name == "scan")
    body = getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"])
    assert paths.scanned_path(body, ("Net",)) == ("Net", "block")


def test_keys_of_dicts_are_noted_as_names_of_modules():
    paths.note_keys(jax.tree.structure({"params": {"layer.0": 1.0}}))
    assert paths.path_of("Net/layer.0/x") == ("Net", "layer.0", "x")
