"""Edits apply together or not at all, and never on the same characters."""

from shardwise.findings import Edit, Safety, SourceFinding
from shardwise.source.edits import apply, choose


def finding(*edits: tuple[int, int, str]) -> SourceFinding:
    made = tuple(Edit(start=start, end=end, text=text) for start, end, text in edits)
    return SourceFinding(code="SW999", message="m", path="a.py", line=1, safety=Safety.SAFE, edits=made)


def test_edits_apply_at_the_offsets_of_the_original():
    edits = [Edit(start=0, end=1, text="AA"), Edit(start=2, end=3, text=""), Edit(start=4, end=4, text="!")]
    assert apply("abcd", edits) == "AAbd!"


def test_overlapping_findings_wait_for_the_next_pass():
    first, second, third = finding((0, 4, "x")), finding((2, 6, "y")), finding((6, 8, "z"))
    assert choose([first, second, third]) == [first, third]


def test_two_insertions_at_one_place_wait():
    first, second = finding((3, 3, "a")), finding((3, 3, "b"))
    assert choose([first, second]) == [first]


def test_the_same_edit_of_two_findings_is_applied_once():
    first, second = finding((0, 1, "")), finding((0, 1, ""))
    chosen = choose([first, second])
    assert chosen == [first, second]
    assert apply("ab", [edit for one in chosen for edit in one.edits]) == "b"


def test_findings_without_edits_are_not_chosen():
    assert choose([finding()]) == []
