"""OpenAI's responses (``POST /v1/responses``) and compatible formats."""
