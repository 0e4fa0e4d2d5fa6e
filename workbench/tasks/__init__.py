"""Long-context tasks whose answers code can check, as rows with the columns `prompt` and `answer`."""

from workbench.tasks.generate import ANSWER_STYLES, make_tasks
from workbench.tasks.haystack import read_haystack
from workbench.tasks.kinds import KINDS
from workbench.tasks.prompts import check_tokenizer, encode_prompt, is_conversational, read_tasks

__all__ = [
    "ANSWER_STYLES",
    "KINDS",
    "check_tokenizer",
    "encode_prompt",
    "is_conversational",
    "make_tasks",
    "read_haystack",
    "read_tasks",
]
