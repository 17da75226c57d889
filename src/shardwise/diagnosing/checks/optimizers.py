"""Does the optimizer hold the parameters that the model uses? Local."""

from collections.abc import Iterator

from shardwise import compat
from shardwise.diagnosing.checks.subject import Subject
from shardwise.findings import Finding, Severity


def held_parameters(subject: Subject) -> Iterator[Finding]:
    """SW421, SW422, SW423: tensors that are not the model's, parameters in no optimizer, parameters in two."""
    own = {id(parameter): name for name, parameter in subject.parameters.items()}
    for name, group in subject.groups.items():
        for parameter in compat.sharded_parameters(group):
            own.setdefault(id(parameter), subject.name_of(parameter) or name)
    held: dict[int, int] = {}
    for optimizer in subject.optimizers:
        foreign = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                held[id(parameter)] = held.get(id(parameter), 0) + 1
                foreign += id(parameter) not in own
        if foreign:
            yield Finding(
                code="SW421",
                message=f"{type(optimizer).__name__} holds {foreign} tensors that the model does not use: its steps "
                "change nothing that is trained",
                where=type(optimizer).__name__,
                severity=Severity.ERROR,
                fix="build it after sharding, or pass it: shardwise.shard(model, optimizers=[optimizer])",
            )
    if not subject.optimizers:
        return
    left_out = [
        name for name, parameter in subject.parameters.items() if parameter.requires_grad and id(parameter) not in held
    ]
    if left_out:
        yield Finding(
            code="SW422",
            message=f"{len(left_out)} trainable parameters are in no optimizer",
            where=left_out[0],
            fix="add them to a parameter group, or freeze them: `requires_grad_(False)`",
        )
    twice = [own[key] for key, count in held.items() if count > 1 and key in own]
    if twice:
        yield Finding(
            code="SW423",
            message=f"{len(twice)} parameters are in two parameter groups or optimizers: each step changes them twice",
            where=twice[0],
            severity=Severity.ERROR,
            fix="put each parameter in one group",
        )
