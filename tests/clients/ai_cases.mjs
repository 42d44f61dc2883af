// What Vercel's `ai` does in the same way through each of its providers.
import {
  APICallError, Output, embedMany, generateText, jsonSchema, stepCountIs, streamText, tool,
} from "ai";
import { ANSWER, PARAMETERS, PERSON, QUESTION, REASONING, WEATHER, assert, assertPerson } from "./cases.mjs";

export function aiCases(native, script, reasoning = REASONING) {
  const ask = { model: native("default"), prompt: QUESTION, temperature: 0, maxRetries: 0 };
  const asked = [];
  const get_weather = tool({
    inputSchema: jsonSchema(PARAMETERS),
    execute: ({ city }) => (asked.push(city), "18 degrees"),
  });
  const loop = {
    model: script("default"),
    prompt: WEATHER,
    tools: { get_weather },
    stopWhen: stepCountIs(3),
    maxRetries: 0,
  };
  return {
    async chat() {
      const { text, usage } = await generateText(ask);
      assert.match(text, /Paris/);
      assert(usage.outputTokens > 0);
    },
    async stream() {
      const answer = streamText(ask);
      const pieces = await Array.fromAsync(answer.textStream);
      assert.match(pieces.join(""), /Paris/);
      assert(pieces.length > 1);
      assert((await answer.usage).outputTokens > 0);
    },
    async tools() {
      const whole = await generateText(loop);
      const streamed = streamText(loop);
      await streamed.consumeStream();
      for (const answer of [whole, streamed]) {
        assert.equal(await answer.text, ANSWER);
        const [first] = await answer.steps;
        assert.deepEqual([first.reasoningText ?? null, first.text], [reasoning, "One moment."]);
        assert.equal(first.finishReason, "tool-calls");
      }
      assert.deepEqual(asked, ["Paris", "Paris"]);
    },
    async structured() {
      const output = Output.object({ schema: jsonSchema(PERSON), name: "person" });
      assertPerson((await generateText({ ...ask, output })).output);
    },
    async error() {
      await assert.rejects(generateText({ ...ask, model: native("nobody") }), (caught) => {
        assert(APICallError.isInstance(caught));
        return caught.statusCode === 404 && /nobody/.test(caught.message);
      });
    },
  };
}

export function embeddingCase(model) {
  return async () => {
    const { embeddings } = await embedMany({ model, values: ["It is sunny.", "He drove away."] });
    assert.deepEqual(embeddings.map((vector) => vector.length), [384, 384]);
    assert.notDeepEqual(embeddings[0], embeddings[1]);
  };
}
