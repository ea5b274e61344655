"""The HTTP surface: proxy routes as plain ASGI, REST as FastAPI routers, errors as statuses."""
