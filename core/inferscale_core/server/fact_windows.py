"""Windows of stored facts: what the fact store and the index know of a fact's surroundings."""

from collections.abc import Sequence

from inferscale_core.client.models import Memory
from inferscale_core.encoding.windows import WindowItem
from inferscale_core.facts.index import EmbeddingIndex
from inferscale_core.facts.records import Claim
from inferscale_core.facts.store import FactStore


class FactWindows:
    """Where the windows of one encoding request come from; ``exclude`` is what it encodes."""

    def __init__(self, store: FactStore, index: EmbeddingIndex, exclude: Sequence[Claim]) -> None:
        self._store = store
        self._index = index
        self._lines = {claim.memory.line for claim in exclude}
        self._ids = [claim.id for claim in exclude]

    def neighbours(self, fact: Claim, count: int) -> Sequence[WindowItem]:
        """The most similar facts of its collection that its owner sees, most similar first."""
        owner = fact.memory.scope
        vector = self._store.get_vectors(owner.tenant, [fact.id]).get(fact.id)
        if vector is None or not count:
            return []
        # Twice as many as needed: some may be rows without KV, or repeat a line.
        (hits,) = self._index.search(
            owner, vector, 2 * count, collection=fact.memory.collection, exclude_ids=self._ids
        )
        found = self._store.get_many([i for i, _ in hits], owner.tenant, scope=owner)
        return self._items(found, count)

    def preceding(self, fact: Claim, count: int) -> Sequence[WindowItem]:
        """The facts of its collection that were made before it, latest first."""
        memory = fact.memory
        before = {"created_at": {"lte": memory.created_at}}
        _, total = self._store.list(
            memory.scope, collection=memory.collection, filters=before, limit=0
        )
        wanted = 2 * count + len(self._ids)
        found, _ = self._store.list(
            memory.scope,
            collection=memory.collection,
            filters=before,
            limit=wanted,
            offset=max(0, total - wanted),
        )
        return self._items([m for m in reversed(found) if m.id not in self._ids], count)

    def _items(self, memories: Sequence[Memory], count: int) -> list[WindowItem]:
        items: dict[str, WindowItem] = {}
        for memory in memories:
            if len(items) == count:
                break
            if memory.kv_state == "none" or memory.line in self._lines or memory.line in items:
                continue
            items[memory.line] = WindowItem(memory.id, memory.line)
        return list(items.values())
