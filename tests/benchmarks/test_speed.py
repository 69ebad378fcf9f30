"""The benchmarks of time and memory: the drivers run, what they compare is the same work, and their fits are fits."""

import csv
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = ("jobs", "meter", "variants", "peers", "growth", "step", "table11", "run")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def scripts(monkeypatch):
    """The scripts as modules, under the names by which they import each other."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def one_process(scripts, monkeypatch, tmp_path):
    """What the child processes run, in this one."""

    def in_children(script, arguments, device):
        found = {}
        for kind in ("time", "memory"):
            raw = tmp_path / f"{kind}.json"
            options = [*arguments, "--device", device, "--measure", kind, "--raw", str(raw)]
            getattr(scripts, Path(script).stem).main(options)
            found[kind] = json.loads(raw.read_text())
        return scripts.meter._with_peaks(found["time"], found["memory"])

    monkeypatch.setattr(scripts.meter, "in_children", in_children)
    return scripts


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as handle:
        return list(csv.DictReader(handle))


def test_one_command_runs_everything(one_process, tmp_path, capsys):
    one_process.run.main(["--quick", "--repeats", "2", "--output", str(tmp_path / "out")])
    rows = table(tmp_path / "out" / "step.csv")
    found = {(row["model"].split()[0], row["stream"], row["variant"]) for row in rows}
    for model in ("smoke-switch", "smoke-olmoe"):
        for stream in ("shared", "expert", "cycle", "monolithic"):
            for variant in ("same passes", "functorch", "hooks", "reference"):
                assert (model, stream, variant) in found
        assert {(model, "shared", "opacus hooks"), (model, "shared", "opacus ghost")} <= found
        assert (model, "cycle", "noise + step") in found
    assert ("smoke-olmoe", "shared", "vmap as shipped (batched_mm)") in found
    assert not any(model == "smoke-switch" and variant.startswith("vmap") for model, _, variant in found)
    assert all(float(row["ms"]) > 0 and float(row["time ratio"]) > 0 for row in rows)
    assert all(float(row["time ratio"]) == 1 for row in rows if row["variant"] == "same passes")
    grown = table(tmp_path / "out" / "growth.csv")
    assert {(row["axis"], row["value"]) for row in grown} == {
        ("batch", "8"), ("batch", "16"), ("experts", "4"), ("experts", "8"),
    }  # fmt: skip
    assert {row["axis"] for row in table(tmp_path / "out" / "growth_slopes.csv")} == {"batch", "experts"}
    paper = table(tmp_path / "out" / "table11.csv")
    assert {(r["method"], r["precision"], r["engine"]) for r in paper} == {
        (method, precision, engine)
        for method in ("raptor", "monolithic_lora")
        for precision in ("fp32", "bf16")
        for engine in ("functorch", "hooks", "same passes")
    }
    assert all(row["micro-batch"] == "6" for row in paper)
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {"step.png", "growth.png"}
    assert "cannot run under torch.func.vmap" in capsys.readouterr().out


def test_children_measure_time_and_memory(scripts, tmp_path):
    """Real processes; the peak is what was allocated, to the byte."""
    script = tmp_path / "child.py"
    script.write_text(
        "import sys\nsys.path.insert(0, sys.argv[-1])\nimport argparse, json, meter, torch\n"
        "parser = argparse.ArgumentParser()\nmeter.common_arguments(parser)\n"
        "args, _ = parser.parse_known_args()\n"
        "runs = {str(mb): (lambda mb=mb: torch.ones(mb * 2**18).sum()) for mb in (10, 80)}\n"
        "found = meter.interleaved(runs, 3, meter.prepare('cpu'), memory=args.measure == 'memory')\n"
        "args.raw.write_text(json.dumps(found))\n"
    )
    # the folder of `meter` last, where the child looks for it
    command = scripts.meter.subprocess.run

    def with_folder(arguments, **settings):
        return command([*arguments, str(FOLDER)], **settings)

    scripts.meter.subprocess = SimpleNamespace(run=with_folder)
    found = scripts.meter.in_children(str(script), [], "cpu")
    assert all(len(values) == 3 for sample in found.values() for values in sample.values())
    assert scripts.meter.peak(found, "10") == pytest.approx(10, abs=0.01)
    assert scripts.meter.peak(found, "80") == pytest.approx(80, abs=0.01)
    assert scripts.meter.peak(found, "10", "80") == scripts.meter.peak(found, "80")
    assert min(found["80"]["seconds"]) > min(found["10"]["seconds"]) > 0


def test_variants_are_interleaved_after_one_round_that_does_not_count(scripts):
    calls = []
    found = scripts.meter.interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, torch.device("cpu"), memory=False
    )
    assert calls == ["a", "b"] * 3
    assert len(found["a"]["seconds"]) == 2


def test_work_is_that_of_the_matrix_products(scripts):
    left, right = torch.ones(2, 3), torch.ones(3, 5)
    assert scripts.meter.work({"product": lambda: left @ right}) == {"product": 2 * 2 * 3 * 5 / 1e9}


def test_a_ratio_is_taken_within_its_round(scripts):
    """A machine that is ten times slower in one round changes no ratio."""
    assert scripts.meter.median_ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0


def test_peers_compute_the_same_clipped_sum(scripts):
    """Opacus's hooks and ghost clipping, and `vmap` of stock OLMoE: three ways to one result."""
    torch.manual_seed(0)
    job = scripts.jobs.JOBS["smoke-olmoe"]
    base = job.make()
    records = scripts.jobs.Records.draw(base, job.records, job.tokens)
    peft_model = scripts.peers._peft_model

    def equal_weights(base, rank):
        torch.manual_seed(1)
        model = peft_model(base, rank)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    scripts.peers._peft_model = equal_weights
    found, absent = scripts.peers.peers(base, records, job.rank)
    sums = {name: run() for name, run in found.items() if not name.startswith("opake")}
    assert len(sums) == 3 and any("DPTrainer" in line for line in absent)
    wanted = sums.pop("vmap as shipped (batched_mm)")
    assert float(torch.cat([value.flatten() for value in wanted.values()]).norm()) > 0.1
    for name, value in sums.items():
        assert set(value) == set(wanted)
        for key in wanted:
            assert torch.allclose(value[key], wanted[key], atol=1e-5), (name, key)
    _, streams = scripts.jobs.attach(base, job.rank)
    assert sum(v.numel() for v in wanted.values()) == sum(p.numel() for p in streams["shared"].values())


@pytest.mark.parametrize(("monolithic", "rank", "count"), [(False, 128, 17_303_042), (True, 32, 14_157_314)])
def test_the_model_of_table_11_has_the_papers_trainables(scripts, monolithic, rank, count):
    with torch.device("meta"):
        base = scripts.jobs.switch(768, blocks=12, vocabulary=32128)
    _, streams = scripts.jobs.attach(base, rank, monolithic=monolithic)
    assert sum(p.numel() for stream in streams.values() for p in stream.values()) == count


@pytest.mark.parametrize(
    ("room", "records", "largest"), [(40, 1000, 32), (10**6, 1000, 1000), (10**6, 20, 20), (7, 1000, 0)]
)
def test_the_largest_micro_batch(scripts, room, records, largest):
    def make(size):
        def run():
            if size > room:
                raise torch.OutOfMemoryError

        return run

    assert scripts.table11.largest_micro_batch(make, records, 8) == largest


def test_other_errors_are_not_taken_for_a_lack_of_memory(scripts):
    def run():
        raise RuntimeError("wrong shape")

    with pytest.raises(RuntimeError, match="wrong shape"):
        scripts.table11.fits(run)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.7])
def test_slopes_are_those_of_power_laws(scripts, power):
    rows = [
        {"axis": "tokens", "value": x, "stream": "cycle", "variant": "hooks", "ms": 3 * x**power, "peak MB": 7.0}
        for x in (4, 8, 32)
    ]
    (found,) = scripts.growth.slopes(rows)
    assert found["time slope"] == found["time slope at the end"] == pytest.approx(power)
    assert found["memory slope"] == pytest.approx(0.0)
    rows[0]["peak MB"] = 0.0
    assert str(scripts.growth.slopes(rows)[0]["memory slope"]) == "nan"


def test_a_cycle_updates_every_trainable_in_micro_batches_of_any_size(scripts):
    """Without noise to tell them apart by: the same passes; the micro-batch changes nothing."""
    job = scripts.jobs.JOBS["smoke-switch"]
    ends = []
    for micro_batch in (2, 5):
        torch.manual_seed(0)
        base = job.make()
        records = scripts.jobs.Records.draw(base, 5, job.tokens)
        model, streams = scripts.jobs.attach(base, job.rank)
        before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        scripts.variants.cycle(model, streams, records, micro_batch, None)()
        after = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        moved = {n for n, p in after.items() if not torch.equal(p, before[n])}
        assert {n for n in after if "lora_B" in n or "score" in n} <= moved
        ends.append(after)
    for name in ends[0]:
        assert torch.allclose(ends[0][name], ends[1][name], atol=1e-6), name


def test_a_gpu_that_is_not_there_is_refused(scripts):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="no GPU"):
        scripts.table11.main([])


def test_the_readme_names_commands_that_exist():
    lines = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("python benchmarks/")]
    assert lines
    for line in lines:
        assert (FOLDER.parent / line.split()[1]).is_file(), line
    done = subprocess.run([sys.executable, FOLDER / "run.py", "--help"], capture_output=True, text=True, check=True)
    assert "--output" in done.stdout
