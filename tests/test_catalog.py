"""docs/layers.md, the catalog of layers, against what the installed Flax exports."""

import re
import types

import pytest

from mpmodules import linen, nnx
from tests.eight_devices import ROOT
from tests.scripts import docs_script

catalog = docs_script("make_layers")
APIS = {"linen": linen, "nnx": nnx}


@pytest.mark.parametrize("api", APIS)
def test_a_new_layer_of_flaxs_is_a_gap_that_names_it(api):
    catalog.require_complete(api)
    theirs = catalog.upstream(api)
    newer = types.ModuleType("newer")
    newer.__dict__.update({name: getattr(theirs, name) for name in dir(theirs)})
    newer.__dict__["HyperDense"] = type("HyperDense", (theirs.Module,), {})
    newer.__dict__["of_no_interest"] = lambda x: x
    assert catalog.gaps(api, newer) == ["HyperDense"]
    told = rf"flax.{api} exports HyperDense, which docs/make_layers.py neither lists"
    with pytest.raises(LookupError, match=told):
        catalog.require_complete(api, newer)


@pytest.mark.parametrize("api", APIS)
def test_what_is_listed_is_ours_and_every_function_of_ours_in_place_of_flaxs_is_listed(api):
    ours, theirs = APIS[api], catalog.upstream(api)
    rows = [row for row in (*catalog.LAYERS, *catalog.FUNCTIONS) if api in row.tests]
    for row in rows:
        if hasattr(theirs, row.name):
            module = getattr(ours, row.name).__module__
            assert module.startswith(("mpmodules.", "policy.")), f"{api}.{row.name} is {module}'s"
    public = (name for name in dir(theirs) if not name.startswith("_"))
    replaced = {name for name in public if getattr(ours, name) is not getattr(theirs, name)}
    steps = {"grad", "value_and_grad"}  # of training, not of a model
    assert replaced <= {row.name for row in rows} | set(catalog.EXEMPT[api]) | steps


def test_what_is_listed_or_exempt_exists_in_this_flax_or_a_newer_one():
    newer = {"RoPE", "dot_product_attention_with_rope", "EMA", "RngStream"}
    for api in catalog.APIS:
        theirs = catalog.upstream(api)
        names = [row.name for row in (*catalog.LAYERS, *catalog.FUNCTIONS) if api in row.tests]
        for name in (*names, *catalog.EXEMPT[api]):
            assert name in newer or hasattr(theirs, name), f"{api}.{name}"
        assert not set(names) & set(catalog.EXEMPT[api])
        assert len(names) == len(set(names))


@pytest.mark.slow
def test_every_test_that_is_named_exists():
    for row in (*catalog.LAYERS, *catalog.FUNCTIONS):
        for test in row.tests.values():
            path, name = test.split("::")
            text = (ROOT / "tests" / path).read_text()
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), test


@pytest.mark.slow
def test_the_page_is_what_the_command_writes():
    assert catalog.PAGE.read_text() == catalog.page(), "run python docs/make_layers.py"
