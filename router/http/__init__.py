"""The OpenAI-compatible endpoint: `server` listens, `app` answers, `fields` says what is taken."""
