"""The wire shapes of the REST API. Bodies refuse unknown fields; answers are described, not checked."""
