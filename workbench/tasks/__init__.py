"""Long-context tasks whose answers code can check, as rows with the columns `prompt` and `answer`."""

from workbench.tasks.prompts import check_tokenizer, encode_prompt, is_conversational, read_tasks

__all__ = ["check_tokenizer", "encode_prompt", "is_conversational", "read_tasks"]
