"""docs/reproduce.md and the benchmark's README: every command is one that its program takes, and the paper's numbers
are those of the paper's tables (tests/oracles/paper).
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.utility import command, diagnostics, figures, tune
from benchmarks.utility.__main__ import make_parser
from benchmarks.utility.settings import GROUPS, resolve_names
from raptor_hf.config import RaptorConfig
from raptor_hf.scripts import _audit, audit
from raptor_hf.scripts._config import parse_dataclasses

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "reproduce.md"
README = ROOT / "benchmarks" / "utility" / "README.md"
ORACLES = ROOT / "tests" / "oracles" / "paper"

# ---- Commands ----

# `python` and `raptor-hf` print their arguments, each ended by NUL, and a newline; any other program is not found.
STUBS = r"""
set -eu
note() { printf '%s\0' "$@"; printf '\n'; }
python() { note python "$@"; }
raptor-hf() { note raptor-hf "$@"; }
"""


def commands_of(block: str) -> list[list[str]]:
    """The commands of a shell script with variables, loops and quotes done by a shell."""
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "-c", STUBS + block], capture_output=True, env={"PATH": os.devnull}, cwd=ORACLES, check=False
    )
    assert done.returncode == 0, f"{block}\n{done.stderr.decode()}"
    return [line.split("\0")[:-1] for line in done.stdout.decode().splitlines()]


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands_in(path: Path) -> list[list[str]]:
    return [found for block in blocks_of(path.read_text(encoding="utf-8")) for found in commands_of(block)]


class Parsed(Exception):
    """What a parser inside a `main` made of its arguments."""


def parsed_by(main, arguments: list[str], monkeypatch) -> argparse.Namespace:
    """The arguments as the parser that `main` makes reads them; nothing after that runs."""
    original = argparse.ArgumentParser.parse_args

    def parse(self, args=None, namespace=None):
        raise Parsed(original(self, args, namespace))

    with monkeypatch.context() as patched, pytest.raises(Parsed) as caught:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse)
        main(arguments)
    return caught.value.args[0]


def check_command(found: list[str], monkeypatch) -> None:
    """Give a command's arguments to the parser, and the checks that need no data, of the program that it names."""
    monkeypatch.chdir(ROOT)
    # configurations with `bf16` are for a GPU, and transformers refuses them where there is none
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    program, *rest = found
    if found[:2] == ["raptor-hf", "audit"]:
        args, flags = audit.make_parser().parse_known_args(rest[1:])
        settings = _audit.read_settings(args.config, flags)
        cells = _audit.cells_of(settings, args.methods, args.epsilons)
        _audit.check_cells({c.name: _audit.cell_settings(settings, c, args.overrides) for c in cells})
    elif found[:3] == ["python", "-m", "benchmarks.utility"]:
        assert command.plan(make_parser().parse_args(rest[2:]))
    elif found[:3] == ["python", "-m", "benchmarks.utility.tune"]:
        assert resolve_names(parsed_by(tune.main, rest[2:], monkeypatch).methods.split(","))
    elif found[:3] == ["python", "-m", "benchmarks.utility.diagnostics"]:
        runs = command.plan(diagnostics.make_parser().parse_args(rest[2:]))
        diagnostics.check_measurable(runs)
        assert runs
    elif found[:3] == ["python", "-m", "benchmarks.utility.figures"]:
        args = figures.make_parser().parse_args(rest[2:])
        if args.figure == "transfer":
            assert set(args.tasks.split(",")) <= set(command.TASKS)
    elif program == "python" and rest[0] in ("benchmarks/step.py", "benchmarks/table11.py"):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        before = set(sys.modules)
        parsed_by(importlib.import_module(Path(rest[0]).stem).main, rest[1:], monkeypatch)
        for name in set(sys.modules) - before:  # they import each other by names that others may have too
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
                del sys.modules[name]
    elif program == "python" and rest[0] == "examples/run_scienceqa.py":
        spec = importlib.util.spec_from_file_location("run_scienceqa", ROOT / rest[0])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        parse_dataclasses((module.ScriptArguments, RaptorConfig), rest[1:], prog=rest[0])
    else:
        raise AssertionError(f"No check for {found}: add one.")


COMMANDS = [
    pytest.param(found, id=f"{path.stem}-{number}")
    for path in (GUIDE, README)
    for number, found in enumerate(commands_in(path))
]


@pytest.mark.parametrize("found", COMMANDS)
def test_a_command_is_one_that_its_program_takes(found, monkeypatch):
    check_command(found, monkeypatch)


@pytest.mark.parametrize(
    "wrong",
    [
        ["python", "-m", "benchmarks.utility", "--methods", "raptr"],
        ["python", "-m", "benchmarks.utility", "--budgets", "1"],
        ["python", "-m", "benchmarks.utility", "--model", "switch-base"],
        ["python", "-m", "benchmarks.utility", "--tuned", "benchmarks/utility/paper.json"],  # --cycles is missing
        ["python", "-m", "benchmarks.utility.tune", "--method", "raptor", "--nothing"],
        ["python", "-m", "benchmarks.utility.diagnostics", "--methods", "nonprivate_lora"],
        ["python", "-m", "benchmarks.utility.figures", "transfer", "--tasks", "cola", "--output", "x.png"],
        ["python", "benchmarks/step.py", "--peers"],
        ["python", "examples/run_scienceqa.py", "--tiny_random", "--output_dir", "x", "--metod", "raptor"],
        ["raptor-hf", "audit", "examples/configs/sst2_switch_base_8.yaml", "--output", "x", "--methods", "raptr"],
        ["raptor-hf", "audit", "examples/configs/sst2_switch_base_8.yaml", "--output", "x", "--columns", "text"],
        ["python", "setup.py"],
    ],
)
def test_a_misspelt_command_is_found(wrong, monkeypatch):
    with pytest.raises((SystemExit, ValueError, AssertionError)):
        check_command(wrong, monkeypatch)


def test_a_shell_expands_variables_and_loops():
    block = 'P="--a 1"\nfor x in 1 2; do for y in u "v w"; do\npython s.py $P --x=$x \\\n  "$y"\ndone; done  # end\n'
    assert commands_of(block) == [
        ["python", "s.py", "--a", "1", f"--x={x}", y] for x in "12" for y in ("u", "v w")
    ]  # fmt: skip
    for wrong in ("curl http://x", "python $UNSET", "for x in 1; do"):
        with pytest.raises(AssertionError):
            commands_of(wrong)


# ---- What there is a command for ----


def _sections(text: str) -> dict[str, str]:
    """Anchor of every heading of the second level -> what stands under it."""
    found = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        found[re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")] = body
    return found


TEXT = GUIDE.read_text(encoding="utf-8")
SECTIONS = _sections(TEXT)


def _tables(text: str) -> list[list[list[str]]]:
    """Every Markdown table: its rows of cells, the heading first, without bold and code marks."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [re.sub(r"[*`]", "", cell).strip() for cell in line.strip("|").split("|")]
        if not inside:
            found.append([])
        inside = True
        if not all(re.fullmatch(r"-+:?", cell) for cell in cells):
            found[-1].append(cells)
    return found


def test_every_table_and_figure_has_commands_and_its_costs():
    overview = _tables(TEXT)[0]
    seen = set()
    for what, _, link, needs, time, memory in overview[1:]:
        kind = ""
        for named, first, last in re.findall(r"(Table|Fig\.)? ?(\d+)(?: to (\d+))?", what):
            kind = named or kind
            seen |= {(kind, n) for n in range(int(first), int(last or first) + 1)}
        if what == "Fig. 1, 2":
            continue
        (anchor,) = re.findall(r"\]\(#(.*?)\)", link)
        assert blocks_of(SECTIONS[anchor]), f"{what} has no command"
        assert needs and time and memory, f"the costs of {what} are missing"
    assert seen == {("Table", n) for n in range(1, 12)} | {("Fig.", n) for n in range(1, 8)}


def test_cycles_are_twenty_epochs():
    sizes = {"sst2": 67_349, "qnli": 104_743, "qqp": 363_846, "mnli": 392_702}  # training records of GLUE
    runs = [found for found in commands_in(GUIDE) if "--cycles" in found]
    assert {found[found.index("--task") + 1] for found in runs} == set(sizes)
    for found in runs:
        task, cycles = (found[found.index(flag) + 1] for flag in ("--task", "--cycles"))
        assert int(cycles) == math.ceil(20 * sizes[task] / 1_000)


# ---- The paper's numbers ----


def _oracle(name: str) -> list[dict[str, str]]:
    with (ORACLES / f"{name}.csv").open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def _number(text: str) -> float:
    return float(text.replace("∞", "inf").replace(",", "").removesuffix("%"))


NAMES = {
    "raptor_entropy": "raptor", "A_global": "matched_global", "B_shared_only": "shared_only",
    "C_expert_only": "expert_only", "D_e=B": "batch_denominator", "full-model clip": "global_clip",
    "no alternating": "no_alternating", "no residual": "no_residual",
}  # fmt: skip
LABELS = {
    "monolithic LoRA": "monolithic_lora", "monolithic full": "monolithic_full", "RAPTOR": "raptor",
    "non-private LoRA": "nonprivate_lora", "A: global": "matched_global",
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "place", "oracle", "key"),
    [
        ("tables-1-5-and-6-switch-base-8-on-glue", 0, "table1_switch", "method"),
        ("tables-1-5-and-6-switch-base-8-on-glue", 1, "table5_ablation", "variant"),
        ("tables-1-5-and-6-switch-base-8-on-glue", 2, "table6_matched", "method"),
        ("table-2-olmoe", 0, "table2_olmoe", "method"),
    ],
)
def test_accuracies_are_the_papers(section, place, oracle, key):
    rows = [(_number(e), name, *map(_number, scores)) for e, _, name, *scores in _tables(SECTIONS[section])[place][1:]]
    wanted = [
        (
            _number(row["epsilon"]),
            NAMES.get(row[key], row[key]),
            *(float(row[t]) for t in ("sst2", "mnli", "qnli", "qqp")),
        )
        for row in _oracle(oracle)
    ]
    assert rows == wanted
    group = re.sub(r"_.*", "", oracle)
    assert {name for _, name, *_ in rows} <= set(GROUPS[group])  # what the command's group runs


def test_table_3_is_the_papers():
    rows = [
        (LABELS[name], *map(_number, rest)) for name, *rest in _tables(SECTIONS["table-3-membership-inference"])[0][1:]
    ]
    assert rows == [(row.pop("method"), *map(_number, row.values())) for row in _oracle("table3_mia")]


def test_table_4_is_the_papers():
    names = {"B": "expected_batch_size", "learning rate": "learning_rate", "C": "clipping", "ρ": "rho"}
    rows = [
        (names.get(n, n), grid.replace(",", ""), chosen)
        for n, grid, chosen in _tables(SECTIONS["table-4-the-grid"])[0][1:]
    ]
    assert rows == [tuple(row.values()) for row in _oracle("table4_grid")]


def test_figure_3_is_the_papers():
    rows = {
        (_number(epsilon), method): score
        for epsilon, *scores in _tables(SECTIONS["figure-3-scienceqa"])[0][1:]
        for method, score in zip(("raptor", "monolithic_lora", "nonprivate_lora"), scores, strict=True)
        if score
    }
    wanted = {(_number(r["epsilon"]), r["method"]): r["accuracy"] for r in _oracle("scienceqa_deepseek_vl2_tiny")}
    assert rows == wanted


def test_tables_7_and_9_are_the_papers():
    section = SECTIONS["tables-7-and-9-figures-5-to-7-routing"]
    heading, *rows = _tables(section)[0]
    found = {}
    for task, *cells in rows:
        for block, cell in zip(heading[1:], cells, strict=True):
            entropy, _, cv = cell.partition(" ")
            found[task, block] = (float(entropy), float(cv.strip("()")) if cv else None)
    with (ORACLES.parent / "table7_routing_entropy.csv").open(encoding="utf-8") as handle:
        seven = {(r["task"], r["encoder_block"]): float(r["normalised_entropy"]) for r in csv.DictReader(handle)}
    nine = {(r["task"], r["block"]): float(r["cv"]) for r in _oracle("table9_cv")}
    assert found == {key: (entropy, nine.get(key)) for key, entropy in seven.items()}
    bold = dict(re.findall(r"^\| (\S+) \|.*\*\*([\d.]+)\*\*", section, re.MULTILINE))
    chosen = [row for row in _oracle("table9_cv") if row["layer"] == "selected"]
    assert bold == {row["task"]: row["normalised_entropy"] for row in chosen} and len(bold) == 4


def test_tables_8_and_10_are_the_papers():
    eight, ten, *_ = _tables(SECTIONS["tables-8-and-10-diagnostics"])
    rows = [(task, LABELS[name], *map(float, rest)) for task, name, *rest in eight[1:]]
    assert rows == [
        (r["task"], r["method"], *(float(r[k]) for k in ("m_role", "mean_snr", "snr_cv")))
        for r in _oracle("table8_diagnostics")
    ]
    rows = [(role, *map(_number, rest)) for role, *rest in ten[1:]]
    assert rows == [
        (r["role"], *(float(r[k]) for k in ("params", "delta_val_loss", "lambda_plus")))
        for r in _oracle("table10_sensitivity")
    ]


def test_table_11_is_the_papers():
    rows, numbers = [], ("peak_gb", "sec_per_step", "gpu_hours")
    for name, trainable, *rest in _tables(SECTIONS["table-11-time-and-memory"])[0][1:]:
        count, share = re.fullmatch(r"([\d.]+M) \(([\d.]+) %\)", trainable).groups()
        rows.append((LABELS[name], count, float(share), *map(float, rest)))
    assert rows == [
        (r["method"], r["trainable_params"], float(r["percent"]), *(float(r[f"{k}_b200"]) for k in numbers))
        for r in _oracle("table11_footprint")
    ]
