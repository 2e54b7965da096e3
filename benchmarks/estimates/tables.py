"""The tables of estimates: which models, under which policies, on which devices."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import policy
from policy.inspect.estimate.report import Estimate
from policy.inspect.estimate.steps import RowLike

RESULTS = Path(__file__).parent / "results"
TARGETS = ("v5e:1x1", "v5e:16x16", "h100:8")
POLICIES = ("float32", "mixed_bfloat16", "bfloat16")

Option = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A row: its name, a policy, and options of the example."""

    name: str
    policy: str
    options: Option = ()

    @property
    def text(self) -> str:
        """The row as the command takes it."""
        return " ".join(
            [f"{self.name}={self.policy}", *(f"{key}={value}" for key, value in self.options)]
        )

    def row(self, more: Mapping[str, Any] = {}) -> RowLike:
        return self.policy, {**dict(self.options), **more}


NARROW_MOMENTS = Choice("bfloat16 moments", "bfloat16", (("moment_dtype", "bfloat16"),))
INT8_MOMENTS = Choice("int8 moments", "bfloat16", (("moment_dtype", "int8"),))


@dataclasses.dataclass(frozen=True)
class Model:
    """A module of this folder with an `example`, and its rows.

    Attributes:
      module: its name.
      title: as it is printed.
      choices: the rows.
      meshes: the mesh of each target that has another one than the axis "data" of all devices.
    """

    module: str
    title: str
    choices: tuple[Choice, ...]
    meshes: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"benchmarks/estimates/{self.module}.py"

    def loaded(self) -> Any:
        return importlib.import_module(f"benchmarks.estimates.{self.module}")


_BASE = tuple(Choice(name, name) for name in POLICIES)
MODELS = (
    Model("language_model", "Language model", _BASE),
    Model("resnet", "ResNet-50", _BASE),
    Model("smollm2", "SmolLM2-135M", _BASE),
    Model(
        "decoder_8b",
        "Decoder of 8 billion params",
        (*_BASE, NARROW_MOMENTS, INT8_MOMENTS),
        {"v5e:16x16": {"data": 4, "fsdp": 64}, "h100:8": {"fsdp": 8}},
    ),
)


@dataclasses.dataclass(frozen=True)
class Table:
    """A model on a target."""

    model: Model
    target: str

    @property
    def mesh(self) -> Mapping[str, int] | None:
        return self.model.meshes.get(self.target)

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.model.module}-{self.target.replace(':', '-')}.json"

    @property
    def command(self) -> list[str]:
        """The command of the table's rows, in words."""
        mesh = [] if self.mesh is None else ["--mesh", _axes(self.mesh)]
        alone = [choice.policy for choice in self.model.choices if not choice.options]
        rows = [("--row", choice.text) for choice in self.model.choices if choice.options]
        return [
            *("python", "-m", "policy", "estimate", f"{self.model.path}:example"),
            *("--on", self.target, *mesh),
            *("--policies", ",".join(alone)),
            *(word for row in rows for word in row),
        ]


def _axes(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def tables(only: Sequence[str] = (), on: Sequence[str] = ()) -> list[Table]:
    """Returns the tables of these models and targets, or all.

    Raises:
      ValueError: there is no such model or target.
    """
    names = [model.module for model in MODELS]
    for given, known, kind in ((only, names, "model"), (on, TARGETS, "target")):
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise ValueError(
                f"There is no {kind} {unknown!r}. Those of tables: {', '.join(known)}."
            )
    return [
        Table(model, target)
        for model in MODELS
        if not only or model.module in only
        for target in TARGETS
        if not on or target in on
    ]


# --------------------------------------------------------------------------------------------------
# Results
# --------------------------------------------------------------------------------------------------


def measured(table: Table, choices: Sequence[Choice], quick: bool = False) -> Iterator[Estimate]:
    """Compiles the step under each choice, and yields an estimate of one row each."""
    module = table.model.loaded()
    for choice in choices:
        yield policy.estimate(
            module.example,
            policies={choice.name: choice.row(module.QUICK if quick else {})},
            on=table.target,
            mesh=table.mesh,
        )


def record(
    found: Estimate, counts: Mapping[str, float], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns an estimate as JSON, after the rows of a record of the same target.

    A row of the same name is replaced.

    Args:
      found: the estimate.
      counts: of the model's params, of the batch's bytes and of FLOPs by hand, of one device.
      before: the record.
    """
    whole = json.loads(json.dumps(dataclasses.asdict(found))) | {"counts": dict(counts)}
    for row in whole["rows"]:
        del row["cost_by_path"]
        row["buffers"] = row["buffers"] if row["is_exhausted"] else []
    rows = {} if before is None else {row["name"]: row for row in before["rows"]}
    return {**whole, "rows": list((rows | {row["name"]: row for row in whole["rows"]}).values())}


def stored(table: Table) -> dict[str, Any] | None:
    """Returns the record of a table; None if there is none."""
    return json.loads(table.file.read_text()) if table.file.exists() else None


def store(table: Table, found: Mapping[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    order = [choice.name for choice in table.model.choices]
    rows = sorted(found["rows"], key=lambda row: order.index(row["name"]))
    table.file.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
