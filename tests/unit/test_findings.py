"""Findings print on one line and know the gravest among them."""

from shardwise.findings import Finding, Severity, worst


def test_finding_prints_where_what_and_fix():
    finding = Finding(code="SW301", message="it is stale", where="model.head", fix="shard first")
    assert str(finding) == "model.head: warning SW301: it is stale (fix: shard first)"
    assert str(Finding(code="SW301", message="it is stale", severity=Severity.NOTE)) == "note SW301: it is stale"


def test_worst_is_the_gravest():
    grave = Finding(code="SW1", message="a", severity=Severity.ERROR)
    light = Finding(code="SW2", message="b", severity=Severity.NOTE)
    assert worst([light, grave]) is Severity.ERROR
    assert worst([]) is None
