"""OpenAI's chat completions (``POST /v1/chat/completions``) and what is compatible with them."""
