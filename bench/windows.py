"""What sliding windows save, and what they keep: KV bytes of one long text, and hits of chats that take turns.

python -m bench.windows [--json]

The worker's cache side and the manager's core as they are, without a model: a step computes nothing. The layout has five layers
with a window of 512 for each one with full attention, in blocks of 16; all layers have KV of the same size.

* One text: a prompt of 8,192 tokens and 1,024 generated ones, in chunks of 512. Its bytes against those of the same text if all
  layers kept everything, at their largest during the prompt, at its end, and once the prompt's last window has been released.
* Eight chats in turns: each prompt is the chat so far and 100 to 300 new tokens, each answer has 50 to 800. The pool of full
  attention has room for all chats, that of the windows for two windows of each. Reusable are the full blocks of the chat so far.
"""

from __future__ import annotations

import json
import random
from typing import Any, Final

from bench.report import command_line, facts
from tests.worker_service.windowed import Worker

BLOCK_SIZE: Final = 16
WINDOW: Final = 512
CHUNK: Final = 512
LAYERS: Final = (1, 5)
"""Without and with a window; as many bytes in each."""
SPAN_BLOCKS: Final = 32


def share(held: tuple[int, ...], num_tokens: int) -> float:
    """Of the bytes that the same text would take if all layers kept everything."""
    whole = -(-num_tokens // BLOCK_SIZE) * sum(LAYERS)
    return sum(count * layers for count, layers in zip(held, LAYERS, strict=True)) / whole


def one_text(num_prompt: int = 8192, num_generated: int = 1024) -> dict[str, Any]:
    """Shares of all-full, and blocks with a window."""
    worker = Worker((2000, 500), (0, WINDOW), chunk=CHUNK)
    sequence = worker.begin("text", range(num_prompt), num_generated)
    during = []
    while sequence.num_computed_tokens < num_prompt:
        worker.step(sequence)
        during.append(worker.held())
    at_end = worker.held()
    later = []
    while len(sequence.tokens) < num_prompt + num_generated:
        worker.step(sequence)
        later.append((len(sequence.tokens), worker.held()))
    released_at = next(tokens for tokens, held in later if held[1] <= SPAN_BLOCKS + 2)
    after = [(tokens, held) for tokens, held in later if tokens >= released_at]
    found = {
        "during the prompt": max(share(held, num_prompt) for held in during),
        "at its end": share(at_end, num_prompt),
        "after its last window": max(share(held, num_prompt) for tokens, held in after[:1]),
        "at the end of the text": share(after[-1][1], len(sequence.tokens)),
        "tokens generated until then": released_at - num_prompt,
        "window blocks": [max(held[1] for held in during), at_end[1], max(held[1] for _, held in after)],
    }
    worker.end(sequence)
    worker.check()
    return found


def chats(num_chats: int = 8, num_turns: int = 8, window_blocks: int = SPAN_BLOCKS * 2 * 8 + 1) -> dict[str, Any]:
    """How much of what could be reused was."""
    draw = random.Random(1)
    worker = Worker((8000, window_blocks), (0, WINDOW), chunk=CHUNK)
    texts: list[list[int]] = [[] for _ in range(num_chats)]
    reusable = reused = count = 0
    for _ in range(num_turns):
        for text in texts:
            prompt = text + [draw.randrange(50_000) for _ in range(draw.randint(100, 300))]
            answer = [draw.randrange(50_000) for _ in range(draw.randint(50, 800))]
            count += 1
            sequence = worker.generate(f"turn {count}", prompt, answer)
            reusable += max(0, len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
            reused += sequence.num_cached_tokens
            text[:] = sequence.tokens
            worker.end(sequence)
    worker.check()
    return {"reusable tokens": reusable, "share reused": reused / reusable, "tokens of a chat": max(map(len, texts))}


def main() -> None:
    arguments = command_line(__doc__, runs=1).parse_args()
    text, turns = one_text(), chats()
    if arguments.json:
        print(json.dumps({"text": text, "chats": turns, "facts": facts()}))
        return
    for name in ("during the prompt", "at its end", "after its last window", "at the end of the text"):
        print(f"{name + ':':26} {text[name]:6.1%} of all-full")
    most, at_end, after = text["window blocks"]
    until = text["tokens generated until then"]
    print(f"blocks with a window: {most} at most, {at_end} at the prompt's end, {after} after {until} tokens")
    reusable, longest = turns["reusable tokens"], turns["tokens of a chat"]
    print(f"eight chats: {turns['share reused']:.1%} of {reusable:,} reusable tokens, in chats of up to {longest:,}")


if __name__ == "__main__":
    main()
