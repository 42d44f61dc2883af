// The official `openai` library for node.
import OpenAI from "openai";
import {
  ANSWER, EMBEDDING_MODEL, KEY, NATIVE_URL, PARAMETERS, PERSON, QUESTION, REASONING, SCRIPT_URL,
  WEATHER, assert, assertPerson, run,
} from "./cases.mjs";

const native = new OpenAI({ baseURL: `${NATIVE_URL}/v1`, apiKey: KEY, maxRetries: 0 });
const script = new OpenAI({ baseURL: `${SCRIPT_URL}/v1`, apiKey: KEY, maxRetries: 0 });
const model = "default";
const messages = [{ role: "user", content: QUESTION }];
const ask = { model, messages, temperature: 0 };

await run({
  async chat() {
    const answer = await native.chat.completions.create(ask);
    assert.match(answer.choices[0].message.content, /Paris/);
    assert(answer.usage.completion_tokens > 0);
  },
  async stream() {
    const events = native.chat.completions.stream({ ...ask, stream_options: { include_usage: true } });
    let text = "";
    events.on("content", (delta) => (text += delta));
    const answer = await events.finalChatCompletion();
    assert.match(text, /Paris/);
    assert.equal(answer.choices[0].message.content, text);
    assert(answer.usage.completion_tokens > 0);
  },
  async tools() {
    const asked = [];
    const getWeather = {
      type: "function",
      function: {
        name: "get_weather",
        description: "Tells the temperature.",
        parameters: PARAMETERS,
        parse: JSON.parse,
        function: ({ city }) => (asked.push(city), "18 degrees"),
      },
    };
    const fields = { model, tools: [getWeather], messages: [{ role: "user", content: WEATHER }] };
    for (const stream of [false, true]) {
      const runner = script.chat.completions.runTools({ ...fields, stream });
      assert.equal(await runner.finalContent(), ANSWER);
      const first = runner.messages.find((message) => message.role === "assistant");
      assert.equal(first.content, "One moment.");
      // This client keeps only the last delta of a field that its types do not have.
      if (!stream) assert.equal(first.reasoning_content, REASONING);
    }
    assert.deepEqual(asked, ["Paris", "Paris"]);
  },
  async structured() {
    const json_schema = { name: "person", schema: PERSON, strict: true };
    const response_format = { type: "json_schema", json_schema };
    const answer = await native.chat.completions.parse({ ...ask, response_format });
    assertPerson(JSON.parse(answer.choices[0].message.content));
  },
  async embeddings() {
    const answer = await native.embeddings.create({
      model: EMBEDDING_MODEL,
      input: ["It is sunny.", "He drove away."],
    });
    const [first, second] = answer.data.map((item) => item.embedding);
    assert.equal(first.length, 384);
    assert.notDeepEqual(first, second);
  },
  async error() {
    await assert.rejects(native.chat.completions.create({ ...ask, model: "nobody" }), (caught) => {
      assert(caught instanceof OpenAI.NotFoundError);
      assert(caught.requestID);
      return caught.code === "model_not_found";
    });
  },
});
