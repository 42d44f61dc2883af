// Vercel's `ai` through `@ai-sdk/anthropic` (Messages).
import { createAnthropic } from "@ai-sdk/anthropic";
import { aiCases } from "./ai_cases.mjs";
import { KEY, NATIVE_URL, SCRIPT_URL, run } from "./cases.mjs";

const native = createAnthropic({ apiKey: KEY, baseURL: `${NATIVE_URL}/v1` });
const script = createAnthropic({ apiKey: KEY, baseURL: `${SCRIPT_URL}/v1` });

await run(aiCases(native, script));
