"""LangChain's ChatOpenAI and its agents, OpenAIEmbeddings, and CohereRerank."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from asked import BEST, CAPITAL, DOCUMENTS, KEY, MODEL, QUERY, ROOT, SECONDS, SIZE, URL, Person, Weather
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

PERSON = "Tom is a baker. He is 42 years old. Write it as JSON."
ROME = "What is the weather in Rome for 3 days?"


@tool
def weather(city: Literal["Oslo", "Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather in a city."""
    return f"{city}: sunny for {days} days"


def model(**options: Any) -> ChatOpenAI:
    options = {"temperature": 0, "max_tokens": 24, "max_retries": 0, "timeout": SECONDS, **options}
    return ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, **options)


class TestText:
    def test_a_chain(self) -> None:
        prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])
        chain = prompt | model() | StrOutputParser()
        assert chain.invoke({"country": "France"}) == "The capital of France is Paris."

    def test_a_batch(self) -> None:
        answers = model().batch([CAPITAL, [SystemMessage("Be brief."), HumanMessage(CAPITAL)]])
        assert all("Paris" in str(answer.content) for answer in answers)


class TestStreaming:
    def test_the_pieces_are_the_whole_answer(self) -> None:
        pieces = list(model().stream(CAPITAL))
        assert len(pieces) > 1
        assert "".join(str(piece.content) for piece in pieces) == model().invoke(CAPITAL).content


class TestAsync:
    async def test_text_and_stream(self) -> None:
        whole = await model().ainvoke(CAPITAL)
        assert "".join([str(piece.content) async for piece in model().astream(CAPITAL)]) == whole.content


class TestTools:
    @pytest.mark.parametrize("choice", ["weather", "any"])
    def test_there_and_back(self, choice: str) -> None:
        bound = model(max_tokens=100).bind_tools([weather], tool_choice=choice)
        answer = bound.invoke(ROME)
        assert isinstance(answer, AIMessage) and not answer.invalid_tool_calls
        call = answer.tool_calls[0]
        assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Paris", "Rome")
        result = weather.invoke(call)
        assert isinstance(result, ToolMessage) and "sunny" in str(result.content)
        ends = [ToolMessage(result.content, tool_call_id=one["id"]) for one in answer.tool_calls]
        after = model().invoke([HumanMessage(ROME), answer, *ends])
        assert after.content

    def test_a_streamed_call(self) -> None:
        bound = model(max_tokens=100).bind_tools([weather], tool_choice="weather")
        gathered: Any = None
        for piece in bound.stream(ROME):
            gathered = piece if gathered is None else gathered + piece
        assert gathered.tool_calls[0]["args"] == bound.invoke(ROME).tool_calls[0]["args"]

    def test_tools_that_the_model_may_leave(self) -> None:
        """With "auto" a model of this size decides badly: only the form of its answer is certain."""
        answer = model(max_tokens=60).bind_tools([weather]).invoke(ROME)
        assert answer.content or answer.tool_calls

    def test_an_agent_ends(self) -> None:
        from langchain.agents import create_agent

        state = create_agent(model(), [weather]).invoke({"messages": [HumanMessage(CAPITAL)]}, {"recursion_limit": 6})
        assert state["messages"][-1].type == "ai"


class TestStructuredOutput:
    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_a_person(self, method: Any) -> None:
        found = model(max_tokens=200).with_structured_output(Person, method=method).invoke(PERSON)
        assert isinstance(found, Person) and found.age == 42

    def test_a_streamed_person(self) -> None:
        *_, last = model(max_tokens=200).with_structured_output(Person).stream(PERSON)
        assert isinstance(last, Person)

    def test_a_tool_is_a_form_too(self) -> None:
        found = model(max_tokens=100).with_structured_output(Weather).invoke(ROME)
        assert isinstance(found, Weather) and found.city == "Rome"


class TestSampling:
    def test_a_seed_repeats_and_a_stop_string_ends(self) -> None:
        warm = model(temperature=1, seed=5)
        assert warm.invoke(CAPITAL).content == warm.invoke(CAPITAL).content
        assert model(stop_sequences=[" is"]).invoke(CAPITAL).content == "The capital of France"

    def test_two_choices(self) -> None:
        (generations,) = model(n=2, temperature=1, seed=1).generate([[HumanMessage("Tell a story.")]]).generations
        assert len(generations) == 2 and generations[0].text != generations[1].text


class TestLogProbabilities:
    def test_of_each_token(self) -> None:
        answer = model(logprobs=True, top_logprobs=2).invoke(CAPITAL)
        content = answer.response_metadata["logprobs"]["content"]
        assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in content)


class TestUsage:
    def test_whole_and_streamed(self) -> None:
        whole = model().invoke(CAPITAL).usage_metadata
        assert whole is not None and whole["total_tokens"] == whole["input_tokens"] + whole["output_tokens"]
        gathered: Any = None
        for piece in model(stream_usage=True).stream(CAPITAL):
            gathered = piece if gathered is None else gathered + piece
        assert gathered.usage_metadata["output_tokens"] == whole["output_tokens"]


class TestErrors:
    def test_they_are_those_of_the_openai_package(self) -> None:
        with pytest.raises(openai.NotFoundError):
            ChatOpenAI(base_url=URL, api_key=KEY, model="gpt-4", max_retries=0).invoke(CAPITAL)
        with pytest.raises(openai.AuthenticationError):
            ChatOpenAI(base_url=URL, api_key="wrong", model=MODEL, max_retries=0).invoke(CAPITAL)
        with pytest.raises(openai.BadRequestError):
            model(temperature=-1).invoke(CAPITAL)


class TestResponses:
    def test_text_and_stream(self) -> None:
        asked = model(use_responses_api=True)
        whole = asked.invoke(CAPITAL)
        assert whole.text == "The capital of France is Paris."
        assert "".join(piece.text for piece in asked.stream(CAPITAL)) == whole.text


class TestEmbeddings:
    def embeddings(self, **options: Any) -> OpenAIEmbeddings:
        # Its check of lengths counts with OpenAI's tokenizers, and sends their token ids.
        options = {"check_embedding_ctx_length": False, "max_retries": 0, "timeout": SECONDS, **options}
        return OpenAIEmbeddings(base_url=URL, api_key=KEY, model=MODEL, **options)

    async def test_documents_and_a_query(self) -> None:
        embeddings = self.embeddings(chunk_size=2)  # several requests
        vectors = embeddings.embed_documents(DOCUMENTS)
        assert [len(vector) for vector in vectors] == [SIZE] * 3
        assert embeddings.embed_query(QUERY) == pytest.approx(vectors[BEST], abs=1e-6)
        assert await embeddings.aembed_query(QUERY) == pytest.approx(vectors[BEST], abs=1e-6)

    def test_a_store_of_vectors(self) -> None:
        store = InMemoryVectorStore.from_texts(DOCUMENTS, self.embeddings())
        ((found, score), *_) = store.similarity_search_with_score(QUERY, k=2)
        assert found.page_content == DOCUMENTS[BEST] and score == pytest.approx(1.0)


class TestReranking:
    def test_documents_of_a_retriever(self) -> None:
        ranker = CohereRerank(base_url=ROOT, cohere_api_key=KEY, model=MODEL, top_n=2)
        found = ranker.compress_documents([Document(text) for text in DOCUMENTS], QUERY)
        assert len(found) == 2 and found[0].page_content == DOCUMENTS[BEST]
        assert found[0].metadata["relevance_score"] == pytest.approx(1.0)
