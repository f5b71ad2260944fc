"""Text and token ids: tokenizers, chat templates, grammars, and answers made of tokens. Knows no engine and no HTTP."""
