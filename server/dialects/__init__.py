"""The request and answer forms of OpenAI, vLLM and SGLang."""
