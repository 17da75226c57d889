"""Findings print on one line."""

from shardwise.findings import Finding, Severity


def test_finding_prints_where_what_and_fix():
    finding = Finding(code="SW301", message="it is stale", where="model.head", fix="shard first")
    assert str(finding) == "model.head: warning SW301: it is stale (fix: shard first)"
    assert str(Finding(code="SW301", message="it is stale", severity=Severity.NOTE)) == "note SW301: it is stale"
