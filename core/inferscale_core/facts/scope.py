"""Who may read a fact."""

import json
from itertools import combinations
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Scope(BaseModel):
    """Owner of a fact, or the reader of a question.

    At least one of ``user``, ``agent`` and ``run`` is set. As a reader, a scope sees the facts
    of its tenant whose owner agrees with it on every field that the reader sets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: str = Field(default="default", min_length=1, max_length=256)
    user: str | None = Field(default=None, min_length=1, max_length=256)
    agent: str | None = Field(default=None, min_length=1, max_length=256)
    run: str | None = Field(default=None, min_length=1, max_length=256)

    @model_validator(mode="after")
    def _names_an_owner(self) -> "Scope":
        if self.user is None and self.agent is None and self.run is None:
            raise ValueError(
                "a scope needs a user, an agent or a run: a question without one would reach "
                "every fact of the tenant; pass for example user='alice'"
            )
        return self

    @property
    def key(self) -> str:
        """Canonical string, unique per scope: the namespace of its segments in the arena."""
        return json.dumps([self.tenant, self.user, self.agent, self.run], ensure_ascii=False)

    @classmethod
    def from_key(cls, key: str) -> "Scope":
        tenant, user, agent, run = json.loads(key)
        return cls(tenant=tenant, user=user, agent=agent, run=run)

    @property
    def owner_fields(self) -> dict[str, str]:
        """The fields among user, agent and run that are set."""
        fields: dict[str, Any] = {"user": self.user, "agent": self.agent, "run": self.run}
        return {name: value for name, value in fields.items() if value is not None}

    def readers(self) -> "list[Scope]":
        """Every scope that sees a fact of this one: itself, and those with fewer fields."""
        fields = list(self.owner_fields.items())
        return [
            Scope(tenant=self.tenant, **dict(some))
            for count in range(1, len(fields) + 1)
            for some in combinations(fields, count)
        ]

    def sees(self, owner: "Scope") -> bool:
        """Whether a reader with this scope may read a fact that ``owner`` owns."""
        return self.tenant == owner.tenant and all(
            getattr(owner, name) == value for name, value in self.owner_fields.items()
        )
