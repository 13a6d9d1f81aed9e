"""Text to token ids and back: chat templates, tokenizing, and text that is final as it streams."""
