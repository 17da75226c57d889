"""`# noqa` allows what it names, on its line or in its file."""

import pytest

from shardwise.linting.files import allowed_in, allowed_on


@pytest.mark.parametrize(
    "line",
    [
        "x()  # noqa",
        "x()  # NOQA",
        "x()  #noqa",
        "x()  # noqa: SW201",
        "x()  # noqa:SW201,E501",
        "x()  # noqa: E501, SW2",
        "x()  # noqa: E501 SW201",
        "x()  # type: ignore  # noqa: SW201",
    ],
)
def test_line_comment_allows_the_code(line: str):
    assert allowed_on(line, "SW201")


@pytest.mark.parametrize(
    "line", ["x()", "x()  # noqa: SW202", "x()  # noqa: E501", "x()  # noqaSW201", "x()  # noqa-ish", "noqa = SW201"]
)
def test_line_comment_allows_nothing_else(line: str):
    assert not allowed_on(line, "SW201")


def test_file_comment_allows_everywhere():
    assert allowed_in("import x\n# shardwise: noqa: SW201\n", "SW201")
    assert allowed_in("# shardwise: noqa\n", "SW299")
    assert not allowed_in("# shardwise: noqa: SW202\n", "SW201")
    assert not allowed_in("x = '# shardwise: noqa'\n", "SW201")
