"""FSDP1 settings that reach torch through a framework: accelerate, Composer, Lightning, transformers."""

from shardwise.rules.moving.frameworks.keywords import framework_findings
from shardwise.rules.moving.frameworks.yaml_files import convert_yaml, may_hold_config

__all__ = ["convert_yaml", "framework_findings", "may_hold_config"]
