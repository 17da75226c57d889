"""What the names in `data.source` stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.training.data.reading import find_sources, standard_library_files


def found(source: str | tuple[str, ...], format: str = "auto") -> list[tuple[str, list[str]]]:
    return [(match.format, [file.name for file in match.files]) for match in find_sources(source, format)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.md", "sub/c.jsonl", "sub/d.bin", ".hidden/e.txt", "z.ndjson"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def test_files_are_known_by_their_names(folder: Path):
    assert found(str(folder / "a.md")) == [("text", ["a.md"])]
    assert found(str(folder / "sub" / "c.jsonl")) == [("jsonl", ["c.jsonl"])]
    assert found(str(folder / "sub" / "d.bin")) == [("tokens", ["d.bin"])]
    assert found(str(folder / "b.txt"), "jsonl") == [("jsonl", ["b.txt"])]


def test_globs_are_sorted_and_lists_keep_their_order(folder: Path):
    assert found(str(folder / "*.[mt]*")) == [("text", ["a.md", "b.txt"])]
    assert found(str(folder / "**" / "*.jsonl")) == [("jsonl", ["c.jsonl"])]
    names = tuple(str(folder / name) for name in ("b.txt", "a.md", "z.ndjson"))
    assert found(names) == [("text", ["b.txt", "a.md"]), ("jsonl", ["z.ndjson"])]


def test_a_folder_is_its_files_of_the_format_but_hidden_ones(folder: Path):
    assert found(str(folder), "jsonl") == [("jsonl", ["c.jsonl", "z.ndjson"])]
    assert found(str(folder), "tokens") == [("tokens", ["d.bin"])]
    assert found(str(folder), "text") == [("text", ["a.md", "b.txt", "c.jsonl", "d.bin", "z.ndjson"])]


def test_what_is_neither_file_nor_module_is_reported_at_once(folder: Path):
    (folder / "empty").mkdir()
    names = (str(folder / "b.txt"), str(folder / "no.txt"), str(folder / "*.csv"), str(folder / "empty"))
    with pytest.raises(ConfigError) as failure:
        find_sources(names, "auto")
    assert failure.value.what == "3 path(s) in data.source match no data"
    assert failure.value.where.splitlines() == [
        f"{folder}/no.txt: there is no such file",
        f"{folder}/*.csv: no file matches",
        f"{folder}/empty: the folder holds no files of the format",
    ]
    with pytest.raises(ConfigError, match="an empty list"):
        find_sources((), "auto")


def test_tokens_and_callables_are_not_mixed_with_text(folder: Path):
    with pytest.raises(ConfigError, match="mixes text and tokens"):
        find_sources((str(folder / "b.txt"), str(folder / "sub" / "d.bin")), "auto")
    with pytest.raises(ConfigError, match="several callables"):
        find_sources(("a:b", "c:d"), "auto")


def test_a_colon_means_a_callable_unless_there_is_such_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert find_sources("my.module:make", "auto")[0].callable == "my.module:make"
    monkeypatch.chdir(folder)
    (folder / "my.module:make").write_text("text")
    assert found("my.module:make") == [("text", ["my.module:make"])]


def test_the_standard_library_is_megabytes_of_python_in_a_fixed_order():
    files = standard_library_files()
    assert files == standard_library_files()
    assert sum(file.stat().st_size for file in files) > 4_000_000, "a run of minutes must not see it many times over"
    names = {file.name for file in files}
    assert {"argparse.py", "dataclasses.py", "subprocess.py"} <= names
    assert not any("test" in file.parts or "site-packages" in file.parts for file in files)
    assert files != sorted(files), "in order of names, the held-out end would be unlike the rest"


def test_other_content_is_another_digest_but_another_place_is_not(tmp_path: Path):
    def digest(folder: str, content: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.txt").write_text(content)
        return find_sources(str(tmp_path / folder), "auto")[0].digest

    first = digest("one", "abc")
    assert digest("two", "abc") == first
    assert digest("one", "abd") != first
    assert digest("one", "abcd") != first
    long = "x" * 200_000  # of which only the two ends are read
    assert digest("one", f"{long}a") != digest("two", f"{long}b")
    assert digest("one", f"a{long}") != digest("two", f"b{long}")
