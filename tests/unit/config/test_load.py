"""Configs from YAML and --set: every problem at once, nearest names, and back to YAML."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from shardwise.config.load import check_ranges, load, to_yaml
from shardwise.config.run import OptimizerConfig, RunConfig, TrainingConfig
from shardwise.config.schema import AXES, GroupOverride, MeshConfig, ShardConfig
from shardwise.errors import ConfigError


def problems_of(source: object, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as failure:
        load(RunConfig, source, overrides)  # pyrefly: ignore
    assert failure.value.exit_code == 2
    assert failure.value.fix
    return failure.value.where.splitlines()


def test_no_file_gives_the_defaults():
    assert load(RunConfig) == RunConfig()


def test_file_and_overrides_are_read_in_turn(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("training: {steps: 5}\nmesh: {replicate: 2}\nshard: {overrides: [{pattern: '*.norm'}]}\n")
    overrides = ["training.steps=6", "training.steps=7", "mesh.shard=4", "optimizer.learning_rate=3e-4"]
    config = load(RunConfig, file, [*overrides, "shard.overrides.0.offload=true"])
    assert (config.training.steps, config.optimizer.learning_rate) == (7, 3e-4)
    assert config.mesh == MeshConfig(replicate=2, shard=4)
    assert config.shard.overrides == (GroupOverride(pattern="*.norm", offload=True),)


def test_mapping_is_not_changed_by_overrides():
    values = {"mesh": {"shard": 2}}
    load(RunConfig, values, ["mesh.shard=4"])
    assert values == {"mesh": {"shard": 2}}


def test_all_problems_are_reported_at_once(tmp_path: Path):
    file = tmp_path / "bad.yaml"
    file.write_text(
        "training: {steps: many}\noptimizer: {learning_rat: 3}\nmesh: {shrad: 4, replicate: two}\nseed: x\n"
        "shard: {precision: {param_dtype: int7}, overrides: [{patern: x}]}\n"
    )
    assert set(problems_of(file, ("seed.x=1", "bogus", "a=1"))) == {
        "--set seed.x=1: seed holds no settings of its own",
        "--set bogus: not of the form a.b=value",
        "seed: input should be a valid integer, got 'x'",
        "training.steps: input should be a valid integer, got 'many'",
        "optimizer.learning_rat: unknown setting (did you mean 'learning_rate'?)",
        "mesh.shrad: unknown setting (did you mean 'shard'?)",
        "mesh.replicate: input should be a valid integer, got 'two'",
        "shard.precision.param_dtype: input should be 'auto' or 'storage' or 'float64', 'float32', "
        "'bfloat16' or 'float16', got 'int7'",
        "shard.overrides.0.patern: unknown setting (did you mean 'pattern'?)",
        "shard.overrides.0.pattern: field required",
        f"a: unknown setting (there are: {', '.join(field.name for field in fields(RunConfig))})",
    }


def test_ranges_of_files_and_of_configs_made_in_python_are_checked_alike():
    wrong = {"training": {"steps": 0, "max_grad_norm": float("nan")}, "optimizer": {"betas": (0.9, 1.0)}}
    lines = [
        "optimizer.betas.1: input should be less than 1, got 1.0",
        "training.steps: input should be greater than or equal to 1, got 0",
        "training.max_grad_norm: input should be greater than or equal to 0, got nan",
    ]
    assert problems_of(wrong) == lines
    made = RunConfig(
        training=TrainingConfig(steps=0, max_grad_norm=float("nan")), optimizer=OptimizerConfig(betas=(0.9, 1.0))
    )
    for config, section, expected in ((made, "", lines), (made.training, "training", lines[1:])):
        with pytest.raises(ConfigError) as failure:
            check_ranges(config, section)
        assert failure.value.where.splitlines() == expected
    check_ranges(RunConfig(shard=ShardConfig(wrap_if=lambda module: True), folder=Path("runs")))  # pyrefly: ignore


def test_number_of_problems_and_the_file_are_named(tmp_path: Path):
    file = tmp_path / "bad.yaml"
    file.write_text("training: {steps: x}\nseed: y\n")
    with pytest.raises(ConfigError, match=r"^2 problems in .*bad\.yaml"):
        load(RunConfig, file)


def test_key_written_twice_is_refused_with_its_line(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("seed: 5\nfolder: x\nseed: 6\n")
    with pytest.raises(ConfigError, match="the key 'seed' occurs twice") as failure:
        load(RunConfig, file)
    assert failure.value.where == f"{file}:3"


@pytest.mark.parametrize(
    ("text", "message"), [("a: [1", "not YAML"), ("- 1\n", "holds a list"), ("just words", "holds a str")]
)
def test_file_that_holds_no_settings_is_refused(tmp_path: Path, text: str, message: str):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(RunConfig, file)


def test_absent_file_is_named():
    with pytest.raises(ConfigError, match=r"cannot read no\.yaml: no such file or directory"):
        load(RunConfig, "no.yaml")


def test_empty_file_is_the_default(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("# nothing\n")
    assert load(RunConfig, file) == RunConfig()


def test_yaml_reads_back_as_the_same_config():
    override = GroupOverride(pattern="*.router", param_dtype="float32")
    shard = ShardConfig(reshard_after_forward=4, overrides=(override,), ignored=("*.scale",))
    config = RunConfig(mesh=MeshConfig(shard=2), shard=shard)
    assert load(RunConfig, yaml.safe_load(to_yaml(config))) == config


def test_what_only_python_can_say_is_left_out_of_yaml():
    config = RunConfig(shard=ShardConfig(wrap_if=lambda module: True))
    assert load(RunConfig, yaml.safe_load(to_yaml(config))) == replace(config, shard=ShardConfig())


def test_notes_stand_above_their_settings_and_change_nothing():
    config = RunConfig(shard=ShardConfig(overrides=(GroupOverride(pattern="a"), GroupOverride(pattern="b"))))
    notes = {"model": ["one: line", "two\nlines"], "training.steps": ["why"], "shard": ["plan # of all"], "data": [""]}
    text = to_yaml(config, notes)
    assert load(RunConfig, yaml.safe_load(text)) == config
    assert text.startswith("# one: line\n# two\n# lines\nmodel: llama3-bytes\n")
    assert "\ntraining:\n  # why\n  steps: 700\n" in text
    assert "\n# plan # of all\nshard:\n" in text


@pytest.mark.parametrize("axis", AXES)
def test_files_and_overrides_reach_every_mesh_axis(tmp_path: Path, axis: str):
    file = tmp_path / "run.yaml"
    file.write_text(f"mesh:\n  {axis}: 4\n")
    assert getattr(load(RunConfig, file).mesh, axis) == 4
    assert load(RunConfig, file, [f"mesh.{axis}=2"]).mesh.sizes(2)[axis] == 2
    with pytest.raises(ConfigError, match=rf"mesh\.{axis}"):
        load(RunConfig, {}, [f"mesh.{axis}=0"])
