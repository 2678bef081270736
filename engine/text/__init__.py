"""Text to token ids and back.

`Tokenizer` encodes strings, chat messages and segments without control tokens in foreign text;
`Detokenizer` turns ids into text as they come and finds stop strings.

Knows prompts and errors, and nothing of requests, blocks or models.
"""
