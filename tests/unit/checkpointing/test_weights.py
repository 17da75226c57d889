"""load_weights() in one process: names, ties, prefixes, damage, and models on meta."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise as sw
from shardwise.checkpointing.state import mark_unusable, mark_usable
from shardwise.checkpointing.weights import load_full, load_weights, save_weights
from shardwise.errors import CheckpointError, ConfigError


class Tied(nn.Module):
    """Two names of one tensor, statistics, and a table that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_buffers(self) -> None:
        self.table = torch.arange(3.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(tokens)))


def build(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def state_of(model: nn.Module, *drop: str) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name not in drop}


def assert_loaded(model: nn.Module, expected: nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        assert torch.equal(dict(model.state_dict())[name], tensor), name


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_whichever_name_of_a_tied_tensor_is_stored(tmp_path: Path, kept: str):
    expected = build()
    (dropped,) = {"embed.weight", "head.weight"} - {kept}
    save_file(state_of(expected, dropped), tmp_path / "w.safetensors")
    for model in (build(1), on_meta(Tied)):
        report = load_weights(model, tmp_path / "w.safetensors")
        assert report.tied == {dropped: kept}
        assert report.is_exact
        assert model.head.weight is model.embed.weight
        assert_loaded(model, expected)


def test_a_tied_tensor_that_is_stored_twice_must_be_stored_equal(tmp_path: Path):
    state = state_of(build())
    save_file(state, tmp_path / "equal.safetensors")
    load_weights(build(1), tmp_path / "equal.safetensors")
    state["head.weight"][4, 3] += 1
    save_file(state, tmp_path / "other.safetensors")
    model = build(1)
    with pytest.raises(CheckpointError, match="different values"):
        load_weights(model, tmp_path / "other.safetensors")
    report = load_weights(model, tmp_path / "other.safetensors", rename={"head.weight": None})
    assert report.ignored == ("head.weight",)
    assert torch.equal(model.head.weight, state["embed.weight"])
    load_weights(model, tmp_path / "other.safetensors", rename={"embed.weight": None})
    assert torch.equal(model.head.weight, state["head.weight"])


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_forward_module.", "module._orig_mod."])
def test_prefixes_in_the_file(tmp_path: Path, prefix: str):
    expected = build()
    save_file({prefix + k: v for k, v in state_of(expected, "head.weight").items()}, tmp_path / "w.safetensors")
    model = build(1)
    report = load_weights(model, tmp_path / "w.safetensors")
    assert report.renamed["embed.weight"] == f"{prefix}embed.weight"
    assert_loaded(model, expected)


@pytest.mark.parametrize("section", ["model", "state_dict", "net", "generator"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_file_of_a_training_loop(tmp_path: Path, section: str, prefix: str):
    """`torch.save({"model": model.state_dict(), "optimizer": ...})`, of a wrapped model too."""
    expected = build()
    optimizer = torch.optim.AdamW([(prefix + name, each) for name, each in expected.named_parameters()])
    expected(torch.arange(4)).sum().backward()
    optimizer.step()
    state = {prefix + name: tensor for name, tensor in expected.state_dict().items()}
    torch.save({section: state, "optimizer": optimizer.state_dict(), "epoch": 1}, tmp_path / "run.pt")
    model = build(1)
    assert load_weights(model, tmp_path / "run.pt").is_exact
    assert_loaded(model, expected)
    fresh = torch.optim.AdamW(model.parameters())
    load_full(tmp_path / "run.pt", model=model, optimizers=fresh)
    assert [each["exp_avg"].tolist() for each in fresh.state.values()] == [
        each["exp_avg"].tolist() for each in optimizer.state.values()
    ]


@pytest.mark.parametrize("part", ["_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
def test_wrappers_in_the_middle_of_stored_names(tmp_path: Path, part: str):
    expected = build()
    state = {k.replace("inner.", f"inner.{part}."): v for k, v in state_of(expected, "head.weight").items()}
    save_file(state, tmp_path / "w.safetensors")
    model = build(1)
    load_weights(model, tmp_path / "w.safetensors")
    assert_loaded(model, expected)


def test_wrappers_of_the_model_itself(tmp_path: Path):
    """torch.compile and activation checkpointing rename the model's side; saving takes it away again."""
    expected = build()
    save_file(state_of(expected, "head.weight"), tmp_path / "w.safetensors")
    model = build(1)
    model.inner[0] = checkpoint_wrapper(model.inner[0])
    model.inner[1] = torch.compile(model.inner[1])
    report = load_weights(model, tmp_path / "w.safetensors")
    assert report.is_exact
    assert torch.equal(model.inner[0].weight, expected.inner[0].weight)
    save_weights(model, tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    for name, tensor in state_of(expected, "head.weight").items():
        assert torch.equal(again[name], tensor), name


def test_a_table_that_the_model_computes_is_not_unexpected(tmp_path: Path):
    expected = build()
    state = state_of(expected, "head.weight") | {"table": torch.full((3,), 9.0)}
    save_file(state, tmp_path / "w.safetensors")
    for model in (build(1), on_meta(Tied)):
        report = load_weights(model, tmp_path / "w.safetensors")
        assert report.ignored == ("table",)
        assert torch.equal(model.table, torch.arange(3.0)), "its own values, not those of the file"
    assert report.rebuilt == ("table",)


def test_strict_lists_everything_and_not_strict_loads_what_fits(tmp_path: Path):
    expected = build()
    state = state_of(expected, "head.weight", "inner.0.bias") | {"inner.0.bais": torch.ones(4)}
    save_file(state, tmp_path / "w.safetensors")
    model = build(1)
    before = model.inner[0].bias.detach().clone()
    with pytest.raises(CheckpointError, match="1 missing, 1 unexpected") as caught:
        load_weights(model, tmp_path / "w.safetensors")
    assert "did you mean inner.0.bais?" in caught.value.where
    report = load_weights(model, tmp_path / "w.safetensors", strict=False)
    assert (report.missing, report.unexpected) == (("inner.0.bias",), ("inner.0.bais",))
    assert torch.equal(model.inner[0].bias, before)
    assert torch.equal(model.inner[0].weight, expected.inner[0].weight)
    load_weights(model, tmp_path / "w.safetensors", rename={"inner.0.bais": "inner.0.bias"})
    assert torch.equal(model.inner[0].bias, torch.ones(4))


def test_a_file_of_another_model_is_refused_even_when_not_strict(tmp_path: Path):
    save_file({"a": torch.ones(2)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="do not match"):
        load_weights(build(), tmp_path / "w.safetensors", strict=False)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("wrong", [torch.ones(4, 5), torch.ones(16), torch.ones(4, 4, dtype=torch.int8)])
def test_shapes_and_kinds_of_numbers_must_fit(tmp_path: Path, wrong: torch.Tensor, strict: bool):
    """Integers into fractions is no cast: the file is quantised."""
    save_file(state_of(build(), "head.weight") | {"inner.0.weight": wrong}, tmp_path / "w.safetensors")
    model = build(1)
    before = state_of(model)
    with pytest.raises(CheckpointError, match=r"mis-shaped(.|\n)*inner\.0\.weight: stored as"):
        load_weights(model, tmp_path / "w.safetensors", strict=strict)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_two_stored_tensors_that_get_one_name(tmp_path: Path):
    save_file({"a.weight": torch.ones(2), "b.weight": torch.ones(2)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="both renamed"):
        load_weights(build(), tmp_path / "w.safetensors", rename={"a": "c", "b": "c"})


def flip(path: Path, needle: torch.Tensor) -> None:
    data = bytearray(path.read_bytes())
    data[bytes(data).index(needle.detach().numpy().tobytes()) + 2] ^= 8
    path.write_bytes(data)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_damage_found_midway_marks_the_model_until_it_is_loaded_again(tmp_path: Path, format: str):
    suffix = {"safetensors": "safetensors", "torch": "pt"}[format]
    good, bad = tmp_path / f"good.{suffix}", tmp_path / f"bad.{suffix}"
    expected = build()
    for path in (good, bad):
        save_weights(expected, path, format)
    flip(bad, expected.inner[0].weight)
    model = build(1)
    with pytest.raises(CheckpointError, match=bad.name):
        load_weights(model, bad)
    uses = (lambda: model(torch.arange(5)), lambda: model.inner(torch.ones(2, 4)), lambda: save_weights(model, "x"))
    for use in uses:
        with pytest.raises(CheckpointError, match="corrupt values"):
            use()
    load_weights(model, good)
    model(torch.arange(5))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("built_on", ["cpu", "meta"])
def test_verified_before_the_model_is_left_untouched(tmp_path: Path, built_on: str):
    expected = build()
    save_weights(expected, tmp_path / "w.safetensors")
    load_weights(build(1), tmp_path / "w.safetensors", verify="before")
    flip(tmp_path / "w.safetensors", expected.inner[0].weight)
    model = on_meta(Tied) if built_on == "meta" else build(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        load_weights(model, tmp_path / "w.safetensors", verify="before")
    if built_on == "meta":
        assert all(tensor.is_meta for tensor in model.state_dict().values())
    else:
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        model(torch.arange(5))
    load_weights(build(1), tmp_path / "w.safetensors", verify="no")  # what was asked for
    with pytest.raises(ConfigError):
        load_weights(build(1), tmp_path / "w.safetensors", verify="never")


def test_a_file_that_is_cut_short_is_found_before_anything_is_written(tmp_path: Path):
    save_file(state_of(build(), "head.weight"), tmp_path / "w.safetensors")
    data = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(data[:-1])
    model = build(1)
    before = state_of(model)
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model(torch.arange(5))


def test_marks_are_taken_away_completely():
    model = build()
    mark_unusable(model, "a")
    mark_unusable(model, "b")
    with pytest.raises(CheckpointError, match="corrupt"):
        model.head(torch.ones(1, 4))
    mark_usable(model)
    mark_usable(model)
    model(torch.arange(5))


def test_recurrent_layers_on_meta(tmp_path: Path):
    """They hold their weights in a list besides, and torch cannot swap those in place."""
    torch.manual_seed(0)
    expected = nn.LSTM(3, 4, num_layers=2)
    save_file(state_of(expected), tmp_path / "w.safetensors")
    model = on_meta(lambda: nn.LSTM(3, 4, num_layers=2))
    load_weights(model, tmp_path / "w.safetensors")
    x = torch.randn(5, 3)
    assert torch.equal(model(x)[0], expected(x)[0])


def test_weights_of_a_distributed_checkpoint_of_torch(tmp_path: Path):
    """With an optimizer beside them, which is no part of the weights and so not unexpected."""
    expected = build()
    optimizer = torch.optim.AdamW(expected.parameters())
    expected(torch.arange(5)).sum().backward()
    optimizer.step()
    state = {"model": expected.state_dict(), "optim": {"state": {"a": torch.ones(2)}}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    model = build(1)
    report = load_weights(model, tmp_path / "dcp")
    assert report.is_exact
    assert_loaded(model, expected)


def test_weights_of_training_files_that_others_write(tmp_path: Path):
    expected = build()
    optimizer = torch.optim.AdamW(expected.parameters()).state_dict()
    for key in ("model", "state_dict", "model_state_dict"):
        path = tmp_path / f"{key}.pt"
        torch.save({key: expected.state_dict(), "epoch": 3, "optimizer": optimizer}, path)
        model = build(1)
        assert load_weights(model, path).is_exact
        assert_loaded(model, expected)


def test_a_model_whose_own_names_begin_with_model(tmp_path: Path):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)

    expected, model = Outer(), Outer()
    torch.save({"model": expected.state_dict()}, tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    assert_loaded(model, expected)
    torch.save(expected.state_dict(), tmp_path / "bare.pt")
    load_weights(Outer(), tmp_path / "bare.pt")


def test_weights_of_another_dtype_into_a_model_on_meta(tmp_path: Path):
    expected = build().to(torch.bfloat16)
    save_weights(expected, tmp_path / "w.safetensors")
    model = on_meta(Tied)
    report = load_weights(model, tmp_path / "w.safetensors")
    assert report.cast["embed.weight"] == ("bfloat16", "float32")
    assert torch.equal(model.embed.weight, expected.embed.weight.float())


def test_a_store_is_read_but_not_written(tmp_path: Path):
    """Loading takes a URL that fsspec serves; single files are written locally."""
    import fsspec

    expected = build()
    save_weights(expected, tmp_path / "w.safetensors")
    store = fsspec.filesystem("memory")
    with store.open("/weights/w.safetensors", "wb") as file:
        file.write((tmp_path / "w.safetensors").read_bytes())
    model = on_meta(Tied)
    load_weights(model, "memory://weights/w.safetensors")
    assert_loaded(model, expected)
    store.rm("/weights", recursive=True)
    with pytest.raises(CheckpointError, match="local disk"):
        save_weights(model, "memory://weights/again")


@pytest.mark.parametrize("scheme", ["file://", "file://localhost", "file:"])
def test_file_urls_are_paths_wherever_one_is_taken(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    at, model = f"{scheme}{tmp_path}", build()
    save_weights(model, f"{at}/folder")
    save_weights(model, f"{at}/w.pt", "torch")
    sw.save_full(f"{at}/run.pt", model=model)
    with sw.Checkpointer(f"{at}/run", asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model)
    step = f"{at}/run/step-00000001"
    targets = {"converted.pt": "full", "converted": "safetensors", "converted-dcp": "dcp"}
    for name, format in targets.items():
        done = sw.convert_checkpoint(step, f"{at}/{name}", format, config=at)
        assert done.path == tmp_path / name
    assert (tmp_path / "converted" / "config.json").exists()
    for name in ("folder", "w.pt", "run.pt", "run", *targets):
        loaded = build(1)
        load_weights(loaded, f"{at}/{name}")
        assert_loaded(loaded, model)
        assert sw.inspect_checkpoint(f"{at}/{name}").num_bytes > 0
        assert sw.verify_checkpoint(f"{at}/{name}") == []
    loaded = build(1)
    sw.load_full(Path(f"file://{tmp_path}/run.pt"), model=loaded)  # as pathlib changes it
    assert_loaded(loaded, model)
    assert list((tmp_path / "here").iterdir()) == []


def test_what_modules_keep_for_themselves_is_not_unexpected(tmp_path: Path):
    expected = build()
    extra = {"inner._extra_state": torch.zeros(7, dtype=torch.uint8)}
    save_file(state_of(expected, "head.weight") | extra, tmp_path / "w.safetensors")
    assert load_weights(build(1), tmp_path / "w.safetensors").ignored == ("inner._extra_state",)
    nested = {**build(1).state_dict(), "inner._extra_state": {"count": torch.ones(3), "kind": "a"}}  # get_extra_state()
    torch.save(nested, tmp_path / "w.pt")
    assert load_weights(build(1), tmp_path / "w.pt").ignored == ("inner._extra_state.count",)


@pytest.mark.parametrize(
    ("name", "format", "fix"),
    [
        ("model.pt", "safetensors", 'format="torch", or name a folder'),
        ("model.pth", "safetensors", 'format="torch"'),
        ("pytorch_model.bin", "safetensors", 'format="torch"'),
        ("model.safetensors", "torch", 'format="safetensors", or name a file that ends in .pt'),
    ],
)
def test_a_name_of_the_other_format_is_refused(tmp_path: Path, name: str, format: str, fix: str):
    with pytest.raises(ConfigError, match=f"format is '{format}', but the path ends in ") as caught:
        save_weights(build(), tmp_path / name, format)
    assert fix in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_counts_of_weights_that_do_not_fit_are_those_of_the_model(tmp_path: Path):
    """Each tensor once, the mis-shaped too: 2 missing and 3 mis-shaped are not "of 3 tensors"."""
    state = {f"{index}.weight": torch.ones(2, 2) for index in range(4)}
    save_file(state, tmp_path / "w.safetensors")
    model = nn.Sequential(nn.Linear(2, 2, bias=False), *(nn.Linear(3, 3, bias=False) for _ in range(5)))
    with pytest.raises(CheckpointError, match="the model of 6 tensors: 2 missing, 3 mis-shaped\n") as caught:
        load_weights(model, tmp_path / "w.safetensors")
    assert len(caught.value.where.splitlines()) == 1 + 2 + 3
