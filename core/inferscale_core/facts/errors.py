"""Errors of the fact store, the filters and the embedder."""


class StoreError(Exception):
    """The fact store cannot be opened, read or written; says what, why and what to do."""


class FactError(StoreError, ValueError):
    """A fact that cannot be stored as given (metadata that is not JSON, an unusable time)."""


class IdConflictError(FactError):
    """The id already belongs to a fact of another scope or collection of the tenant."""


class FilterError(ValueError):
    """A metadata filter that cannot be understood; names the part that is wrong."""


class EmbedderError(Exception):
    """The embedding model cannot be loaded or gave no usable vectors."""
