"""The fields of a config as options of a command, in groups; the comment of a field is its description."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from dataclasses import dataclass, fields
from textwrap import dedent
from typing import Any, get_type_hints

GROUPS = {
    "data": "data tokenizer column context data_root download size source interpolation workers crop scale "
    "local_crops local_size local_scale flip mixup cutmix erase randaugment jitter latents cache",
    "model and shortcut": "model model_args pretrained patch weights shortcut where init freeze_heads carry_rate "
    "long_skips drop_path",
    "optimisation": "optimizer lr lr_end weight_decay weight_decay_end decays layer_decay batch epochs steps "
    "warmup clip precision narrow accumulate grad_checkpointing compile graph fsdp ema",
    "evaluation": "validate evaluate_every online_sequences online_images online_time health",
    "run": "preset seed device checkpoint_every log_every tracker",
}
_GROUP = {name: group for group, names in GROUPS.items() for name in names.split()}
_COMMENT = re.compile(r"^    (\w+): .*  # (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Field:
    """One field of a config."""

    name: str
    type: Any
    about: str


def field_groups(config: type[Any]) -> dict[str, list[Field]]:
    """The fields of a config by group, in the order of `GROUPS`; a recipe's own fields are in the group "recipe".

    Fields that the recipe does not use are left out.
    """
    comments: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        with suppress(OSError):  # a class defined in an interpreter has no source
            comments |= dict(_COMMENT.findall(dedent(inspect.getsource(base))))
    hints = get_type_hints(config, include_extras=True)
    groups: dict[str, list[Field]] = {group: [] for group in (*GROUPS, "recipe")}
    for field in fields(config):
        if field.name not in config.no_use:
            about = comments.get(field.name, "")
            groups[_GROUP.get(field.name, "recipe")].append(Field(field.name, hints[field.name], about))
    return {group: members for group, members in groups.items() if members}
