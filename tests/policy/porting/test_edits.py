"""What ``python -m policy port`` edits in a text: imports of Flax and dtypes of its layers."""

import inspect
import textwrap

import flax.linen
import flax.nnx
import pytest

from policy.porting.imports import LAYERS
from policy.porting.port import ported
from policy.porting.source import PortError, PythonFile

HEAD = """
import functools
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
"""


def port(text, head=HEAD):
    """Returns the port of a text without its head, and what is told of it."""
    found = ported(PythonFile(f"{head}# body\n{textwrap.dedent(text)}".encode()), "net.py")
    again = ported(PythonFile(found.after.encode()), "net.py")
    assert again.after == found.after and again.arguments == 0
    return found.after.partition("# body\n")[2], found


IMPORTS = {
    "from flax import linen": "from mpmodules import linen",
    "from flax import linen as nn, nnx": "from mpmodules import linen as nn, nnx",
    "from flax import linen as nn, struct": (
        "from mpmodules import linen as nn\nfrom flax import struct"
    ),
    "x = 1; from flax import struct, nnx  # both": (
        "x = 1; from mpmodules import nnx; from flax import struct  # both"
    ),
    "import flax.linen as nn, flax.struct as struct": (
        "import mpmodules.linen as nn, flax.struct as struct"
    ),
    "from flax.linen import Dense as D": "from mpmodules.linen import Dense as D",
    "from flax.linen import *": "from mpmodules.linen import *",
    "from flax.linen.linear import (\n    Dense,  # ours\n    default_kernel_init\n)": (
        "from mpmodules.linen import Dense\n"
        "from flax.linen.linear import (\n    default_kernel_init\n)"
    ),
    "from flax.linen import partitioning, Dense": (
        "from mpmodules.linen import Dense\nfrom flax.linen import partitioning"
    ),
    "from flax.nnx.nn.linear import Linear": "from mpmodules.nnx import Linear",
    "import flax\nimport flax.linen\nfrom flax import linen": (
        "import flax\nimport flax.linen\nfrom mpmodules import linen"
    ),
    "from . import linen\nfrom flax.linen import linear": (
        "from . import linen\nfrom flax.linen import linear"
    ),
    "from  flax  import \\\n    nnx, \\\n    struct": (
        "from mpmodules import nnx\nfrom  flax  import \\\n    \\\n    struct"
    ),
    "try:\n    from flax import nnx, linen, core\nexcept ImportError: nnx = None": (
        "try:\n    from mpmodules import nnx, linen\n    from flax import core\n"
        "except ImportError: nnx = None"
    ),
}


@pytest.mark.parametrize("text", IMPORTS)
def test_imports_come_from_mpmodules(text):
    assert port(text, head="")[0] == port(IMPORTS[text], head="")[0] == IMPORTS[text]


ARGUMENTS = {
    "nn.Dense(4, dtype=self.dtype)": "nn.Dense(4)",
    "nn.Dense(4, dtype=self.dtype,)": "nn.Dense(4,)",
    "nn.Dense(dtype=self.dtype, features=4)": "nn.Dense(features=4)",
    "nn.LayerNorm(dtype=cfg.dtype)": "nn.LayerNorm()",
    "nn.LayerNorm(\n    dtype=cfg.dtype,\n)": "nn.LayerNorm(\n)",
    "nn.Dense(4, dtype=x.dtype, param_dtype=self.param_dtype, name='a')": "nn.Dense(4, name='a')",
    "nn.Dense(4, use_bias=False, dtype=dtype,\n         name='a')(x)": (
        "nn.Dense(4, use_bias=False,\n         name='a')(x)"
    ),
    "nn.Dense(\n    4,\n    dtype=self.dtype,  # of all\n    # the name\n    name='a',\n)": (
        "nn.Dense(\n    4,\n    # the name\n    name='a',\n)"
    ),
    "nn.Dense(4,\n         dtype=self.dtype)(x)": "nn.Dense(4)(x)",
    "nn.Dense(\n    4,  # wide\n    dtype=self.dtype)(x)": "nn.Dense(\n    4,  # wide\n    )(x)",
    "nn.Dense(\n    4,\n    # none,\n    dtype=self.dtype\n)": "nn.Dense(\n    4,\n    # none,\n)",
    "nn.Dense(4, dtype=(\n    self.dtype), name='é')": "nn.Dense(4, name='é')",
    "'é', nn.Dense(4, dtype=self.dtype_mm)": "'é', nn.Dense(4)",
    "functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)": (
        "functools.partial(nn.Conv, use_bias=False)"
    ),
    "nn.RNN(nn.LSTMCell(4, dtype=self.dtype), name='rnn')": "nn.RNN(nn.LSTMCell(4), name='rnn')",
    "nn.remat(nn.Dense)(4, dtype=config.compute_dtype)": "nn.remat(nn.Dense)(4)",
    "(nn.Conv if a else nn.Dense)(4, dtype=self.dtype)": "(nn.Conv if a else nn.Dense)(4)",
    "nn.Dense(4, dtype=jnp.dtype(cfg.dtype))": "nn.Dense(4)",
    "nn.Dense(4, dtype=self.dtype or x.dtype)": "nn.Dense(4)",
    "nnx.Linear(4, 4, dtype=dtype, param_dtype=cfg.weight_dtype, rngs=rngs)": (
        "nnx.Linear(4, 4, rngs=rngs)"
    ),
}


@pytest.mark.parametrize("text", ARGUMENTS)
def test_the_model_s_dtype_goes_from_layers(text):
    define = "def f(self, cfg, config, x, a, rngs, dtype=None):\n"
    before, after = (
        define + textwrap.indent(each, "    ", lambda _: True) + "\n"
        for each in (text, ARGUMENTS[text])
    )
    assert port(before)[0] == after


def test_aliases_are_followed_in_their_scopes():
    text = """
    Dense = functools.partial(nn.Dense, use_bias=False)
    Own = object

    def one(dtype):
        Dense(4, dtype=dtype)
        dense = Dense
        return [dense(n, dtype=dtype) for n in (1, 2)]

    def two(dtype, Dense):
        return Dense(4, dtype=dtype), Own(dtype=dtype), [nn(dtype=dtype) for nn in ()]

    class Net(nn.Module):
        def f(self, nn):
            return nn.Dense(4, dtype=self.dtype)
    """
    after, found = port(text)
    assert after == textwrap.dedent(text).replace("4, dtype=dtype)", "4)", 1).replace(
        "n, dtype=dtype)", "n)"
    )
    assert found.arguments == 2


def test_names_of_a_star_import_are_flax_s_if_it_is_the_only_one():
    star, text = "from flax.linen import *\n", "def f(dtype): return Dense(4, dtype=dtype)\n"
    assert port(text, star)[1].arguments == 1
    assert port(text, f"{star}from other import *\n")[1].arguments == 0


NOT_EDITED = """
class Net(nn.Module):
    dtype: Any = jnp.float32
    conv: Any = nn.Conv

    @nn.compact
    def __call__(self, x, dtype=jnp.bfloat16, **kwargs):
        assert x.dtype == self.dtype and jnp.finfo(self.dtype).min < 0
        x = self.conv(4, dtype=self.dtype)(x.astype(self.dtype))
        x = Block(dtype=self.dtype, config=dict(dtype=self.dtype))(jnp.asarray(x, self.dtype))
        mask = nn.make_causal_mask(x, dtype=self.dtype)
        scale = self.param("scale", nn.initializers.ones, (4,), self.param_dtype)
        x = jnp.einsum("a,b", x, x, preferred_element_type=self.dtype)
        f"{nn.Dense(4, dtype=self.dtype)}"
        if self.dtype == "float32":
            return nn.dot_product_attention(x, x, x, dtype=self.dtype, precision="highest")
        cfg = dataclasses.replace(cfg, dtype=dtype)
        return self.clone(dtype=dtype), cfg, getattr(self, "dtype")
"""


def test_nothing_else_is_edited():
    assert port(NOT_EDITED)[0] == NOT_EDITED


STAYS = {
    "nn.Dense(4, dtype=jnp.float32, name='router')": (
        '`dtype=jnp.float32` of router stays and is obeyed; the rule {".*router": "c=f32"} says '
        "the same"
    ),
    "self.head = nn.Dense(4, dtype='float32')": (
        '`dtype=\'float32\'` of head stays and is obeyed; the rule {".*head": "c=f32"} says the '
        "same"
    ),
    "nn.Dense(4, dtype=self.router_dtype)": (
        "`dtype=self.router_dtype` of Dense stays and is obeyed"
    ),
    "nn.LayerNorm(param_dtype=jnp.float32)": (
        "`param_dtype=jnp.float32` of LayerNorm stays and is obeyed"
    ),
    "nn.Dense(4, dtype=self.param_dtype)": "`dtype=self.param_dtype` of Dense stays and is obeyed",
}


@pytest.mark.parametrize("line", STAYS)
def test_a_layer_keeps_a_dtype_of_its_own_with_the_rule_that_says_the_same(line):
    text = f"""
    class Net(nn.Module):
        def setup(self):
            self.a = nn.Dense(4, dtype=self.dtype)
            {line}
    """
    after, found = port(text)
    assert after == textwrap.dedent(text).replace("nn.Dense(4, dtype=self.dtype)", "nn.Dense(4)")
    assert found.stays == {STAYS[line]: {12}}


WHOLE = {
    "nn.Dense(4, dtype=pick(self.dtype))": "line 12 computes a dtype: `dtype=pick(self.dtype)`",
    "nn.Dense(4, **self.options)": "line 12 may pass a dtype by `**`",
    "nn.Dense(4, True, self.dtype)": "line 12 passes a dtype by its position",
    "flax.linen.Dense(4)": "line 12 calls Flax's own Dense: import it by its name",
    "nn.linear.Dense(4)": "line 12 calls Flax's own Dense: import it by its name",
    "self.a.dtype": "line 11 makes `a`, whose dtype is read",
}


@pytest.mark.parametrize("line", WHOLE)
def test_a_class_keeps_all_dtypes_if_one_is_not_known_from_the_file(line):
    text = f"""
    class Net(nn.Module):
        def setup(self):
            self.a = nn.Dense(4, dtype=self.dtype)
            {line}

    class Other(nn.Module):
        def setup(self):
            self.b = nn.Dense(4, dtype=self.dtype)
    """
    after, found = port(text, HEAD.replace("import jax\n", "import jax, flax\n"))
    other = textwrap.dedent(text).rpartition("class Other")[2]
    assert after.endswith(other.replace("4, dtype=self.dtype", "4"))
    assert after.partition("class Other")[0] == textwrap.dedent(text).partition("class Other")[0]
    (note,) = found.stays
    assert note == f"the dtypes of Net stay, as {WHOLE[line]}"


def test_a_dict_that_is_written_out_passes_no_dtype():
    text = """
    def f(dtype, kernel_init):
        options = dict(kernel_init=kernel_init)
        return nn.Dense(4, dtype=dtype, **options, **{"use_bias": False})
    """
    assert port(text)[0] == textwrap.dedent(text).replace(" dtype=dtype,", "")


def test_lines_that_a_person_may_delete_are_listed_by_their_reason():
    text = """
    from config import DTYPE
    from flax.training import dynamic_scale

    class Net(nn.Module):
        dtype: object = jnp.bfloat16

        @nn.compact
        def __call__(self, x):
            x = Block(dtype=self.dtype)(x.astype(self.dtype))
            return nn.Dense(4, dtype=DTYPE)(x), flax.linen.gelu(x)
    """
    _, found = port(text)
    texts = {reason.partition(":")[0][:30]: lines for reason, lines in found.deletable.items()}
    assert texts == {
        "holds a dtype that may go wher": {13},
        "16 bits were chosen here": {13},
        "passes a dtype along": {17},
        "a cast to the model's dtype, w": {17},
        "a loss scale by hand": {10},
        "an import that nothing reads": {9},
        "Flax's, not imported by its ow": {18},
    }


def test_the_layers_are_those_of_flax_with_a_dtype():
    for package in (flax.linen, flax.nnx):
        found = set()
        for name, value in vars(package).items():
            if inspect.isclass(value) and issubclass(value, package.Module):
                names = inspect.signature(value).parameters
                found |= {name} & LAYERS if "param_dtype" not in names else {name}
        assert found and found == {name for name in LAYERS if hasattr(package, name)}


def test_an_edit_that_would_change_more_is_rejected():
    text = b"from \\\n flax import linen as nn\n"
    with pytest.raises(PortError, match="an import that is written over several lines"):
        ported(PythonFile(text), "net.py")


def test_a_class_of_the_file_that_only_calls_a_layer_is_edited_as_the_layer():
    text = """
    class Scaled(nnx.Embed):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Cast(nnx.Embed):
        def __call__(self, x):
            return super().__call__(x).astype(self.dtype)

    class Net(nnx.Module):
        def __init__(self, cfg, rngs):
            self.embed = Scaled(4, 4, dtype=cfg.dtype, rngs=rngs)

    class Other(nnx.Module):
        def __init__(self, cfg, rngs):
            self.embed = Cast(4, 4, dtype=cfg.dtype, rngs=rngs)
            self.head = nnx.Linear(4, 4, dtype=cfg.dtype, rngs=rngs)
    """
    after, found = port(text)
    assert after == textwrap.dedent(text).replace(" dtype=cfg.dtype,", "", 1)
    note = "the dtypes of Other stay, as line 23 calls Cast, whose code reads a dtype"
    assert found.stays == {note: {23, 24}}
