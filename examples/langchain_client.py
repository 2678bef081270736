"""LangChain's own OpenAI client, asking the application in fastapi_app.py.

python examples/fastapi_app.py &
python examples/langchain_client.py --url http://localhost:8000/llm/v1
"""

from __future__ import annotations

import argparse

from langchain_openai import ChatOpenAI

QUESTION = "When is the shop open?"


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key="none", model=model)

    answer = chat.invoke(QUESTION)
    print(answer.content)
    print(answer.usage_metadata)

    for chunk in chat.stream(QUESTION):
        print(chunk.content, end="", flush=True)
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://localhost:8000/llm/v1")
    # "rag" answers from the application's documents. The model without them has its own name:
    # curl localhost:8000/llm/v1/models
    parser.add_argument("--model", default="rag")
    args = parser.parse_args()
    main(args.url, args.model)
