"""Groups a model asks for itself: whom it asks, which settings follow, and what becomes of ties."""

from typing import Any

from torch import Tensor, nn

from shardwise.config.schema import GroupOverride
from shardwise.planning.calls import callable_children
from shardwise.sharding.fsdp1_keys import Translation
from shardwise.sharding.prepare import chosen_modules, drop_ignored, join_ties, overrides_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


class Model(nn.Module):
    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        if answer is not None:
            self.fsdp_wrap_fn = answer


def ask(model: nn.Module) -> tuple[dict[str, dict[str, Any]] | None, Translation]:
    translation = Translation()
    return chosen_modules(model, translation), translation


def test_a_model_without_an_opinion_says_nothing():
    assert ask(Model())[0] is None


def test_the_function_answers_true_false_or_settings():
    def answer(module: nn.Module) -> Any:
        return {"reshard_after_forward": False} if isinstance(module, Block) else isinstance(module, nn.Embedding)

    chosen, translation = ask(Model(answer))
    blocks = {f"blocks.{index}": {"reshard_after_forward": False} for index in range(2)}
    assert chosen == {"embedding": {}, **blocks}
    assert translation.problems == []


def test_an_attribute_comes_before_the_function():
    model = Model(lambda module: isinstance(module, Block))
    model.blocks[0]._fsdp_wrap = False  # pyrefly: ignore
    model.head._fsdp_wrap = True  # pyrefly: ignore
    assert list(ask(model)[0] or ()) == ["head", "blocks.1"]


def test_a_part_with_a_function_of_its_own_is_asked_about_what_it_holds():
    model = nn.Sequential(Model(lambda module: isinstance(module, Block)), Model())
    assert list(ask(model)[0] or ()) == ["0.blocks.0", "0.blocks.1"]


def test_precision_and_offload_of_one_module_are_translated():
    settings = {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"}, "cpu_offload": True}
    chosen, _ = ask(Model(lambda module: settings if isinstance(module, nn.Embedding) else False))
    assert chosen == {"embedding": {"param_dtype": "float32", "reduce_dtype": "float32", "offload": True}}


def test_unknown_settings_are_problems_with_the_nearest_name():
    _, translation = ask(Model(lambda module: {"reshard_after": 1, "mixed_precision": "PURE"}))
    text = "\n".join(translation.problems)
    assert "fsdp_wrap_fn(embedding).reshard_after: " in text
    assert "did you mean 'reshard_after_forward'?" in text
    assert "'PURE' does not name a dtype" in text
    assert "fsdp_wrap_fn((root)).reshard_after: " in text


def test_settings_of_the_root_stay_at_the_root():
    chosen, _ = ask(Model(lambda module: {"offload": True} if isinstance(module, Model) else isinstance(module, Block)))
    assert chosen == {"(root)": {"offload": True}, "blocks.0": {}, "blocks.1": {}}
    assert overrides_of(chosen, {"offload": False}) == (GroupOverride(pattern="(root)", offload=True),)


def test_tied_modules_leave_their_weights_to_the_group_around_them():
    model = Model(lambda module: isinstance(module, nn.Embedding | Block | nn.Linear))
    model.head.weight = model.embedding.weight
    chosen, translation = ask(model)
    assert chosen is not None
    assert {"embedding", "head"} <= chosen.keys()
    join_ties(model, chosen, translation)
    assert {"embedding", "head"} & chosen.keys() == set()
    assert "blocks.0.inner" in chosen
    assert any("embedding.weight = head.weight" in note for note in translation.notes)


def test_ties_climb_until_at_most_one_named_group_holds_them():
    model = nn.ModuleDict({"left": Block(), "right": Block()})
    model["right"].inner.weight = model["left"].inner.weight  # pyrefly: ignore
    chosen = {"left": {}, "left.inner": {}, "left.out": {}, "right": {}}
    join_ties(model, chosen, Translation())
    assert list(chosen) == ["left", "left.out"]  # the plan joins what `left` and the root share


def test_a_tie_inside_one_group_is_left_alone():
    block = Block()
    block.out.weight = block.inner.weight
    chosen: dict[str, dict[str, Any]] = {"0": {}}
    join_ties(nn.Sequential(block), chosen, Translation())
    assert list(chosen) == ["0"]


def test_settings_of_an_outer_module_do_not_reach_the_groups_inside():
    chosen = {
        "outer": {"reshard_after_forward": False, "offload": True},
        "outer.a": {},
        "outer.b": {"offload": True},
        "other": {},
    }
    base = {"reshard_after_forward": True, "offload": False}
    assert overrides_of(chosen, base) == (
        GroupOverride(pattern="outer", reshard_after_forward=False, offload=True),
        GroupOverride(pattern="outer.a", reshard_after_forward=True, offload=False),
        GroupOverride(pattern="outer.b", reshard_after_forward=True, offload=True),
    )


def test_callable_children_of_containers_are_their_elements():
    assert list(dict(callable_children(Model()))) == ["embedding", "head", "blocks.0", "blocks.1"]
    nested = nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]), nn.Linear(1, 1))
    assert list(dict(callable_children(nested))) == ["0.0", "0.1", "1"]


def test_what_is_ignored_is_no_group_nor_is_what_lies_inside():
    chosen: dict[str, dict[str, Any]] = {
        "tower": {},
        "tower.block": {},
        "towers": {},
        "blocks.0": {},
        "blocks.1": {},
    }
    drop_ignored(chosen, ("tower", "blocks.1"))
    assert list(chosen) == ["towers", "blocks.0"]
