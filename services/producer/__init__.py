"""The producer's room: prompts go to SGLang as token ids, completions come back as token ids."""
