"""OpenAI's responses (``POST /v1/responses``) and what is compatible with them."""
