"""compose.yaml for another number of cards: its first server's block is repeated, one server a card."""

import re

from services.errors import UserError

# A server's block, from its name to the empty line that ends it.
SERVER = re.compile(r"^  sglang-(\d+):\n(?:    .*\n)+\n", re.MULTILINE)
DEPENDS = re.compile(r"^      sglang-\d+: (\{condition: service_healthy\}\n)", re.MULTILINE)
SERVERS = re.compile(r'^(      DFLASH_SERVERS: ").*("\n)', re.MULTILINE)


def render(compose: str, gpus: int) -> str:
    """Return the text of `compose` (a compose.yaml of any number of cards) for the cards 0 to `gpus` - 1.

    Raises:
        UserError: the text has no server whose block could be repeated.
    """
    blocks, depends = list(SERVER.finditer(compose)), list(DEPENDS.finditer(compose))
    if not blocks or not depends or not SERVERS.search(compose):
        raise UserError("no services named sglang-0, sglang-1 ... are here: give this project's compose.yaml")
    cards = range(gpus)
    first = blocks[0][0].replace(f"sglang-{blocks[0][1]}:", "sglang-{card}:")
    first = first.replace(f'device_ids: ["{blocks[0][1]}"]', 'device_ids: ["{card}"]')
    addresses = ",".join(f"http://sglang-{card}:30000" for card in cards)
    # From the end, so that earlier places stay where they are.
    compose = _replace(compose, depends, "".join(f"      sglang-{card}: {depends[0][1]}" for card in cards))
    compose = SERVERS.sub(rf"\g<1>{addresses}\g<2>", compose)
    return _replace(compose, blocks, "".join(first.replace("{card}", str(card)) for card in cards))


def _replace(text: str, found: list[re.Match[str]], by: str) -> str:
    return text[: found[0].start()] + by + text[found[-1].end() :]
