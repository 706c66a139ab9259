"""Whether the server in this container generates: 8 tokens after 4, whose ids come back."""

import json
import sys
import urllib.request

TOKENS = 8

if __name__ == "__main__":
    body = {
        "input_ids": [1, 2, 3, 4],
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        "http://127.0.0.1:30000/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = json.load(response)
    ids = answer.get("output_ids")
    if not isinstance(ids, list) or len(ids) != TOKENS:
        sys.exit(f"asked for {TOKENS} tokens, the server answered {str(answer)[:300]}")
    sys.stdout.write(f"the server generated {TOKENS} tokens\n")
