"""Google's ``generateContent`` and ``streamGenerateContent`` (``/v1beta/models/{model}:...``)."""
