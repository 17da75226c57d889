"""What launchers and log collectors put before a line: a clock, a process, a rank. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CLOCK = r"(?P<clock>\d{2}:\d{2}:\d{2}(?:[.,]\d+)?)"
_STAMP = re.compile(
    # Kubernetes and docker (with the stream and its F or P mark), loggers, Slurm; in brackets or not.
    rf"\s*\[?\d{{4}}[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?\]?"
    r"(?:\s+std(?:out|err) [FP])?\s?"
)
_AMERICAN = re.compile(rf"\s*\[?(?P<month>\d\d)/(?P<day>\d\d)/\d{{4}} {_CLOCK}\]?\s?")
_GLOG = re.compile(rf"^\s*\[?[IWEF](?P<month>\d{{1,2}})(?P<day>\d\d) {_CLOCK}")
_RANK = re.compile(
    r"\s*(?:"
    r"\[(?:rank|default|trainer|worker)[ =:]*(?P<bracket>\d+)\]:?"  # torch's excepthook, torchrun's tee, Lightning
    r"|\[(?P<old>\d+)\]:(?=\s?\S)"  # torchrun's tee before it named the role
    r"|\[\d+,(?P<mpi>\d+)\]<std(?:out|err)>:"
    r"|\(?(?:global[ _])?rank[ =]?(?P<plain>\d+)\)?\s*[:|]"
    r")(?: ?\| ?|\s?)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\s*(?P<label>\d{1,5}): ?")  # srun --label
_PROCESS = re.compile(
    r"\s*(?:"
    r"\((?P<actor>[\w.:<>-]+(?:\([^()]*\))? (?:rank=\d+, )?pid=\d+(?:, ip=[\w.:]+)?)\)"  # Ray
    r"|\[(?P<pod>pod/[^\]]+)\]"  # kubectl logs --prefix
    r"|(?P<service>[\w.-]*[a-z][\w.-]*[-_]\d+)\s+\|"  # docker compose
    r"|(?P<host>(?:worker|node|host|gpu)[\w.-]*):(?=\s)"  # pdsh
    r") ?"
)
_OPENS = frozenset("[(0123456789")


@dataclass(frozen=True, slots=True)
class Prefix:
    """What stood before a line, and the line itself."""

    rank: int | None
    process: str
    """As written; "" where nothing names one."""
    time: str | None
    """Month, day and clock, so that every style of stamp sorts with every other."""
    text: str


def has_labels(lines: list[str]) -> bool:
    """True where most lines begin with `3: `: then it is srun's label and not part of what was said."""
    said = [line for line in lines[:2000] if line.strip()]
    labelled = sum(_LABEL.match(_after_stamp(line)) is not None for line in said)
    return labelled > len(said) / 2


def split_prefix(text: str, *, labels: bool) -> Prefix:
    """Take off everything that is not the program's own, in whatever order it stands."""
    rank, process, time = None, "", None
    while _may_be_prefixed(text):
        if stamp := _STAMP.match(text) or _AMERICAN.match(text):
            time = time or _sortable(stamp)  # the outermost: one collector's clock for all
            text = text[stamp.end() :]
        elif named := _RANK.match(text):
            rank = int(next(filter(None, named.groups())))  # the innermost: the global rank
            text = text[named.end() :]
        elif labels and rank is None and (label := _LABEL.match(text)):
            rank = int(label["label"])
            text = text[label.end() :]
        elif speaker := _PROCESS.match(text):
            process = process or next(filter(None, speaker.groups()))
            text = text[speaker.end() :]
        else:
            break
    if time is None and (glog := _GLOG.match(text)):
        time = _sortable(glog)
    return Prefix(rank, process, time, text)


def _may_be_prefixed(text: str) -> bool:
    """A cheap look, for logs of many lines: every prefix begins with one of these or soon has one of those."""
    head = text[:48].lstrip()
    return head[:1] in _OPENS or ": " in head or "|" in head or head[-1:] == ":"


def _after_stamp(text: str) -> str:
    stamp = _STAMP.match(text)
    return text[stamp.end() :] if stamp else text


def _sortable(stamp: re.Match[str]) -> str:
    clock, _, fraction = stamp["clock"].replace(",", ".").partition(".")
    return f"{stamp['month']:0>2}-{stamp['day']} {clock}.{fraction:0<9.9}"
