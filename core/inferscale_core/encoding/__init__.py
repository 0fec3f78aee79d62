"""What is sent to the engine: prompt template, encoding windows and encoding plans."""

from inferscale_core.encoding.plan import EncodingRequest, LineTooLongError, plan_encoding
from inferscale_core.encoding.template import ComposedPrompt, PromptTemplate, TemplateError
from inferscale_core.encoding.windows import WindowItem, window_builder, within_budget

__all__ = [
    "ComposedPrompt", "EncodingRequest", "LineTooLongError", "PromptTemplate", "TemplateError",
    "WindowItem", "plan_encoding", "window_builder", "within_budget",
]  # fmt: skip
