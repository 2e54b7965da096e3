"""A corpus of files in the styles of published packages: their ports, run before and after."""

import ast
import difflib
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import policy
from mpmodules import linen as our_linen
from mpmodules import nnx as our_nnx
from policy.core.messages import DtypePolicyWarning
from policy.porting.port import ported
from policy.porting.source import PythonFile
from tests.porting.sources import load

STYLES = sorted(Path(__file__).with_name("styles").glob("*.py"))
# dtype arguments of layers that go, and that stay
COUNTS = {"big_vision": (4, 0), "t5x": (1, 0), "easylm": (9, 1), "maxtext": (2, 3), "tunix": (5, 1)}
POLICY = "mixed_bfloat16"
# with matmuls in float32 under the policy: of routers, and of classes whose dtypes stay
FLOATS = {"easylm", "maxtext", "tunix"}
KEPT = (ast.arguments, ast.AnnAssign, ast.Compare)
LAYERS = re.compile(r"import|Dense|Conv|Embed|Norm|Attention|Linear|dtype=[\w.]*dtype(_mm)?\b")


def port(file: Path) -> Any:
    return ported(PythonFile(file.read_bytes()), file.name)


def results(text: str, name: str) -> Any:
    """Returns the parameters, outputs and gradients of a style's model in float32."""
    module: Any = load(text, name)
    model = module.model()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        if isinstance(model, linen.Module):
            params = model.init(jax.random.key(0), *module.INPUTS)
            call = model.apply
        else:
            graph, params = nnx.split(model)
            call = lambda params, *inputs: nnx.merge(graph, params)(*inputs)  # noqa: E731

        def loss(params: Any) -> Any:
            outputs: Any = call(params, *module.INPUTS)
            return jnp.square(outputs).sum()

        found = params, call(params, *module.INPUTS), jax.grad(loss)(params)
    return jax.tree.map(np.asarray, jax.tree.leaves(found))


@pytest.mark.parametrize("file", STYLES, ids=lambda file: file.stem)
def test_a_port_is_the_same_in_float32_bit_for_bit(file):
    before, after = results(file.read_text(), "before"), results(port(file).after, "after")
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("file", STYLES, ids=lambda file: file.stem)
def test_nothing_is_edited_but_imports_and_arguments_of_layers(file):
    found = port(file)
    pair = [text.splitlines() for text in (found.before, found.after)]
    removed = [line[1:] for line in difflib.ndiff(*pair) if line[:1] == "-"]
    assert removed and all(LAYERS.search(line) for line in removed)
    staying = sum(map(len, found.stays.values()))
    assert (found.arguments, staying) == COUNTS[file.stem]
    nodes = (ast.walk(ast.parse(text)) for text in (found.before, found.after))
    kept = ([ast.dump(n) for n in each if isinstance(n, KEPT)] for each in nodes)
    assert next(kept) == next(kept)


def float32_share(model: Any, inputs: Any) -> float:
    """Returns the share of the FLOPs of matmuls with a float32 operand."""
    with jax.numpy_rank_promotion("allow"):
        if isinstance(model, linen.Module):
            inputs = jax.eval_shape(model.init, jax.random.key(0), *inputs), *inputs
            return policy.audit(model.apply, *inputs).f32_matmul_share
        return policy.audit(model, *inputs).f32_matmul_share


@pytest.mark.parametrize("file", STYLES, ids=lambda file: file.stem)
def test_under_a_policy_a_port_computes_as_the_unedited_model_does_by_apply_policy(file):
    unedited: Any = load(file.read_text(), "unedited")
    edited: Any = load(port(file).after, "under_a_policy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DtypePolicyWarning)  # of the dtypes that stay
        model = unedited.model()
        api: Any = our_linen if isinstance(model, linen.Module) else our_nnx
        expected = float32_share(api.apply_policy(model, POLICY), unedited.INPUTS)
        with policy.use_policy(POLICY):
            found = float32_share(edited.model(), edited.INPUTS)
    assert found == expected if file.stem not in FLOATS else 1 > found > expected
