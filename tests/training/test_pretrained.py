"""Directories of Hugging Face: read into each strategy, written, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shoal
from helpers.pretrained_models import MODELS, WORDS, Pretrained, save
from helpers.ranks import Ranks
from shoal.util.errors import CheckpointError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves each model once."""
    base, saved = tmp_path_factory.mktemp("pretrained"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in saved:
            saved[name] = save(name, base)
        return saved[name]

    return folder


@pytest.fixture(scope="module")
def four() -> Iterator[Callable[[str], Ranks]]:
    with Ranks(4) as ranks:
        layout = "replicate=-1"

        def divided(wanted: str) -> Ranks:
            nonlocal layout
            if wanted != layout:
                ranks.divide(wanted)
                layout = wanted
            return ranks

        yield divided


def carried_over(world: shoal.World, name: str, layout: str, folder: Path, out: Path) -> Tensor:
    """The logits of a model that was created without values, loaded and exported."""
    case = MODELS[name]
    model = shoal.parallelize(case.model, world, case.strategy(layout), empty=True)
    shoal.load(model, folder)
    shoal.export(model, out, max_shard_size="20KB")
    with torch.no_grad():
        logits: Tensor = model(**case.inputs()).logits
    return logits


def row(name: str, layout: str) -> Any:
    first = {("mixtral", "shard=2,tensor=2"), ("vit", "shard=-1")}
    return pytest.param(name, layout, marks=() if (name, layout) in first else pytest.mark.full)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        row(name, layout)
        for layout in ("shard=2,tensor=2", "shard=-1", "replicate=2,shard=2", "replicate=2,tensor=2")
        for name in MODELS
    ]
    + [row("llama", "replicate=-1")],
)
def test_a_sharded_model_has_the_values_of_from_pretrained(
    name: str,
    layout: str,
    folders: Callable[[str], Path],
    four: Callable[[str], Ranks],
    tmp_path: Path,
) -> None:
    case, out = MODELS[name], tmp_path / "model-0.1"
    logits = four(layout).call(carried_over, name, layout, folders(name), out)
    reference, exported = case.reference(folders(name)), case.reference(out)
    expected, state = reference.state_dict(), exported.state_dict()
    assert expected.keys() == state.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    with torch.no_grad():
        wanted = reference(**case.inputs()).logits
    assert all((one - wanted).abs().max() < 1e-12 for one in logits)
    names = [json.loads((f / "model.safetensors.index.json").read_text()) for f in (out, folders(name))]
    assert names[0]["weight_map"].keys() == names[1]["weight_map"].keys()
    assert names[0]["metadata"]["total_size"] == names[1]["metadata"]["total_size"]


class Stack(nn.Sequential):
    """Layers with rows that do not divide evenly, in the forms of stages."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(5, 5) for _ in range(4)), nn.BatchNorm1d(5))


def staged(world: shoal.World, folder: Path, out: Path) -> tuple[int, dict[str, Tensor]]:
    strategy = [shoal.Pipeline(split_points=("2",))]
    model = shoal.parallelize(Stack, world, strategy, statistics="rank", empty=True)
    shoal.load(model, folder, rename=lambda name: name.removeprefix("body."))
    shoal.export(model, out, max_shard_size=120)
    return len(model.state_dict()), load_file(next(out.glob("model-00002*")))


@pytest.mark.processes
@pytest.mark.parametrize(
    "layout", [pytest.param("shard=2,pipeline=2", marks=pytest.mark.full), "replicate=2,pipeline=2"]
)
def test_stages_read_and_write_their_own_layers(
    layout: str, four: Callable[[str], Ranks], tmp_path: Path
) -> None:
    state = {f"body.{name}": one for name, one in Stack().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    out = tmp_path / "out"
    counts = [count for count, _ in four(layout).call(staged, tmp_path, out)]
    assert counts[0] < len(state)
    found: dict[str, Tensor] = {}
    for file in out.glob("*.safetensors"):
        found.update(load_file(file))
    assert {f"body.{name}" for name in found} == state.keys()
    assert all(torch.equal(one, state[f"body.{name}"]) for name, one in found.items())
    fresh = Stack()
    shoal.load(fresh, out)
    assert torch.equal(fresh.get_parameter("1.weight"), state["body.1.weight"])


def logits_loss(output: Any, batch: Any) -> tuple[Tensor, int]:
    logits = output if isinstance(output, Tensor) else output.logits
    targets = batch["input_ids"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), len(targets)


def trained(world: shoal.World, model: nn.Module) -> list[float]:
    """The losses of three steps."""
    words = torch.arange(48).reshape(8, 6) * 7 % WORDS
    task = shoal.Task(logits_loss, inputs=lambda batch: {"input_ids": batch["input_ids"]})
    step = shoal.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), task)
    data = shoal.Loader({"input_ids": words}, world, batch_size=8, micro_batches=2)
    return [step(batch).loss for batch in data.epochs(3)]


def staged_decoder(
    world: shoal.World, case: Pretrained, layout: str, folder: Path, out: Path
) -> list[float]:
    model = shoal.parallelize(case.stages, world, case.strategy(layout), empty=True)
    shoal.load(model, folder)
    shoal.export(model, out, max_shard_size="20KB")
    return trained(world, model)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "shard=2,pipeline=2"),
        pytest.param("mixtral", "replicate=2,pipeline=2", marks=pytest.mark.full),
        pytest.param("llama", "tensor=2,pipeline=2", marks=pytest.mark.full),
    ],
)
def test_stages_of_a_decoder_train_like_from_pretrained(
    name: str, layout: str, four: Callable[[str], Ranks], tmp_path: Path
) -> None:
    """Its forward is written again, in a class that inherits from that of transformers."""
    case = MODELS[name]
    case = case._replace(options={**case.options, "tie_word_embeddings": False})
    folder, out = tmp_path / "saved", tmp_path / "out"
    torch.manual_seed(0)
    case.model().save_pretrained(folder, max_shard_size="20KB")
    losses = four(layout).call(staged_decoder, case, layout, folder, out)
    expected, state = case.reference(folder).state_dict(), case.reference(out).state_dict()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    with shoal.init() as world:
        wanted = trained(world, shoal.parallelize(case.reference(folder).train(), world))
    assert all(each == pytest.approx(wanted, rel=1e-12) for each in losses)


PLAIN = nn.Linear(3, 2)


def written(folder: Path) -> Path:
    """A directory of two files with an index."""
    folder.mkdir()
    for number, name in enumerate(("weight", "bias")):
        save_file({name: PLAIN.state_dict()[name]}, folder / f"model-{number}.safetensors")
    index(folder, weight="model-0.safetensors", bias="model-1.safetensors")
    return folder


def index(folder: Path, **places: Any) -> None:
    text = json.dumps({"weight_map": places})
    (folder / "model.safetensors.index.json").write_text(text)


def cut(folder: Path) -> None:
    data = (folder / "model-0.safetensors").read_bytes()
    (folder / "model-0.safetensors").write_bytes(data[:-1])


def header(folder: Path, **changes: Any) -> None:
    """Replace fields of the header of a file."""
    fields = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}
    text = json.dumps({"weight": fields}).encode()
    (folder / "model-0.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))


def outside(folder: Path, path: str) -> None:
    save_file({"weight": torch.zeros(2, 3)}, folder.parent / "x.safetensors")
    index(folder, weight=path.format(folder.parent), bias="model-1.safetensors")


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / "model-0.safetensors").unlink(), "missing: model-0.safetensors"),
    "above": (lambda f: outside(f, "../x.safetensors"), r"refers to '\.\./x\.safetensors'"),
    "absolute": (lambda f: outside(f, "{}/x.safetensors"), "not the name of a safetensors file"),
    "pickled": (lambda f: index(f, weight="model.bin"), "refers to 'model.bin'"),
    "no name": (lambda f: index(f, weight=["x"]), "not the name"),
    "no map": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "no weight_map"),
    "no json": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "is not a JSON file"),
    "mixed": (lambda f: save_file(PLAIN.state_dict(), f / "model-1.safetensors"), "also has weight"),
    "lacks": (
        lambda f: index(f, weight="model-1.safetensors", bias="model-1.safetensors"),
        "the file lacks weight",
    ),
    "cut": (cut, "would end at byte"),
    "sizes": (lambda f: header(f, shape=[2, 4]), "is damaged"),
    "negative": (lambda f: header(f, shape=[-2, -3]), "is damaged"),
    "quantized type": (lambda f: header(f, dtype="F4"), "quantized weights: tensors of type F4"),
    "quantized": (
        lambda f: header(f, dtype="I8", data_offsets=[0, 6]),
        "weight is int8 instead of float32: quantized",
    ),
    "configuration": (
        lambda f: (f / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}'),
        r"quantized \(gptq\)",
    ),
    "shape": (lambda f: header(f, shape=[3, 2]), r"weight: \(3, 2\) instead of \(2, 3\)"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_or_hostile_directory_changes_nothing(case: str, tmp_path: Path) -> None:
    folder, (damage, found) = written(tmp_path / "model"), HOSTILE[case]
    model = nn.Linear(3, 2)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    damage(folder)
    with pytest.raises(CheckpointError, match=found):
        shoal.load(model, folder)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def refused(world: shoal.World, folder: Path) -> tuple[str, bool]:
    model = shoal.parallelize(nn.Linear(3, 2), world)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError) as error:
        shoal.load(model, folder / f"rank-{world.rank}")
    return error.value.found, torch.equal(model.weight, before)


@pytest.mark.processes
def test_an_error_of_one_rank_is_an_error_on_all(four: Callable[[str], Ranks], tmp_path: Path) -> None:
    for rank in range(4):
        written(tmp_path / f"rank-{rank}")
    cut(tmp_path / "rank-3")
    ((found, same),) = {*four("replicate=-1").call(refused, tmp_path)}
    assert same
    assert "rank 3:" in found


@pytest.mark.parametrize("where", ["file", "directory"])
def test_urls_are_read(where: str, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    folder = written(tmp_path / "model")
    store = fsspec.filesystem("memory")
    store.put(str(folder), f"/{tmp_path.name}", recursive=True)
    model = nn.Linear(3, 2)
    try:
        if where == "directory":
            shoal.load(model, f"memory://{tmp_path.name}")
            assert torch.equal(model.bias, PLAIN.bias)
        else:
            shoal.load(model, f"memory://{tmp_path.name}/model-0.safetensors", strict=False)
        assert torch.equal(model.weight, PLAIN.weight)
    finally:
        store.rm(f"/{tmp_path.name}", recursive=True)


def test_a_name_on_the_hub_is_read_from_the_cache_or_refused_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit, cache = "0" * 40, tmp_path / "models--org--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text(commit)
    (cache / "snapshots").mkdir()
    written(cache / "snapshots" / commit)
    for revision in (None, commit):
        model = nn.Linear(3, 2)
        shoal.load(model, "org/name", revision=revision)
        assert torch.equal(model.weight, PLAIN.weight)
    with pytest.raises(CheckpointError, match="not in the local Hugging Face cache") as error:
        shoal.load(nn.Linear(3, 2), "org/name", revision="1" * 40)
    assert f"hf download org/name --revision {'1' * 40}" in error.value.fix


def test_only_common_names_are_loaded_without_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"missing: 0\.weight"):
        shoal.load(model, written(tmp_path / "model"))
    kept = model.get_parameter("1.weight").detach().clone()
    shoal.load(model, tmp_path / "model", rename="0.{}".format, strict=False)
    assert torch.equal(model.get_parameter("0.weight"), PLAIN.weight)
    assert torch.equal(model.get_parameter("1.weight"), kept)
    assert "not in the source, unchanged: 1.weight, 1.bias" in capsys.readouterr().out


def test_an_export_replaces_an_export_and_nothing_else(world: shoal.World, tmp_path: Path) -> None:
    model = shoal.parallelize(nn.Linear(3, 2), world)
    for size in (10, "5GB"):
        shoal.export(model, tmp_path / "out", max_shard_size=size)
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    (tmp_path / "out/tokenizer.json").touch()
    with pytest.raises(CheckpointError, match=r"other files, such as tokenizer\.json"):
        shoal.export(model, tmp_path / "out")
    with pytest.raises(CheckpointError, match="neither a number of bytes nor"):
        shoal.export(model, tmp_path / "new", max_shard_size="many")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_parameters_without_values_are_not_trained(world: shoal.World) -> None:
    model = shoal.parallelize(lambda: nn.Linear(3, 2), world, empty=True)
    assert model.weight.isnan().any()
    with pytest.raises(shoal.StepError, match="has its values already"):
        shoal.parallelize(nn.Linear(3, 2), world, empty=True)
