"""For web applications: answers as server-sent events, OpenAI's routes, an end without hanging.

    app = FastAPI(lifespan=lifespan)  # opens `engine`, see `graceful_shutdown`
    app.mount("/llm", openai_app(engine))

    @app.get("/answer")
    async def answer(q: str) -> Response:
        return sse(rag.stream(q))

Needs `ragserve[web]`. It brings no server: these are ASGI applications and responses, for the
application's own.
"""

from __future__ import annotations

from .errors import ClientLeftError, error_response, retry_after, status_of
from .limits import ApiKey
from .openai import openai_app
from .shutdown import graceful_shutdown
from .sse import Event, SSEResponse, sse, until_disconnect

__all__ = [
    "sse",
    "until_disconnect",
    "graceful_shutdown",
    "openai_app",
    "ApiKey",
    # beneath them
    "Event",
    "SSEResponse",
    "ClientLeftError",
    "error_response",
    "retry_after",
    "status_of",
]
