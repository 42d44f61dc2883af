"""The client's examples from the specification's third document. Only the address differs, and
line breaks that the document lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dynamo_client.client
import dynamo_client.sync
from dynamo_client import DynamoConfig

MODELS = ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "Llama-2-7b-chat-hf")
ADDRESS = "http://localhost:8000"

USAGE = '''
import asyncio
from dynamo_client import DynamoClient, DynamoConfig

async def example_usage():
    """Dynamo客户端使用示例"""
    config = DynamoConfig(
        base_url="http://localhost:8000",
        timeout=60,
        max_retries=3
    )
    async with DynamoClient(config) as client:
        # 1. 检查服务状态
        health = await client.health_check()
        print(f"Service health: {health}")
        # 2. 获取可用模型
        models = await client.list_models()
        print(f"Available models: {[model['id'] for model in models]}")
        # 3. 执行聊天完成
        messages = [
            {"role": "system", "content": "你是一个有用的AI助手。"},
            {"role": "user", "content": "请解释什么是机器学习?"}
        ]
        response = await client.chat_completion(
            messages=messages,
            model="deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            max_tokens=500,
            temperature=0.7
        )
        print(f"Response: {response['choices'][0]['message']['content']}")
        # 4. 使用流式响应
        print("\\n流式响应:")
        async for chunk in await client.chat_completion(
            messages=messages,
            model="deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            max_tokens=200,
            stream=True
        ):
            if 'choices' in chunk and chunk['choices']:
                delta = chunk['choices'][0].get('delta', {})
                if 'content' in delta:
                    print(delta['content'], end='', flush=True)
        print("\\n")

# 运行示例
if __name__ == "__main__":
    asyncio.run(example_usage())
'''

BASIC = '''
import asyncio
from dynamo_client import DynamoClient, DynamoConfig

async def basic_usage_example():
    """基本使用示例"""
    # 配置客户端
    config = DynamoConfig(
        base_url="http://localhost:8000",
        timeout=60
    )
    async with DynamoClient(config) as client:
        # 1. 检查服务状态
        health = await client.health_check()
        print(f"服务状态: {health['status']}")
        # 2. 单轮对话
        response = await client.chat_completion(
            messages=[
                {"role": "user", "content": "你好,请介绍一下自己"}
            ],
            model="Llama-2-7b-chat-hf",
            max_tokens=200
        )
        print(f"AI回复: {response['choices'][0]['message']['content']}")
        # 3. 多轮对话
        conversation = [
            {"role": "system", "content": "你是一个专业的Python编程助手。"},
            {"role": "user", "content": "如何在Python中实现快速排序?"}
        ]
        response = await client.chat_completion(
            messages=conversation,
            model="Llama-2-7b-chat-hf",
            max_tokens=500,
            temperature=0.3  # 降低温度以获得更确定的回答
        )
        # 将AI回复添加到对话历史
        conversation.append({
            "role": "assistant",
            "content": response['choices'][0]['message']['content']
        })
        # 继续对话
        conversation.append({
            "role": "user",
            "content": "能否提供一个完整的代码示例?"
        })
        response = await client.chat_completion(
            messages=conversation,
            model="Llama-2-7b-chat-hf",
            max_tokens=800
        )
        print(f"代码示例: {response['choices'][0]['message']['content']}")

# 运行示例
asyncio.run(basic_usage_example())
'''

STREAMING = '''
import asyncio
from dynamo_client import DynamoClient, DynamoConfig

async def streaming_chat_example():
    """流式对话示例"""
    config = DynamoConfig(base_url="http://localhost:8000")
    async with DynamoClient(config) as client:
        messages = [
            {"role": "system", "content": "你是一个创意写作助手。"},
            {"role": "user", "content": "请写一个关于未来城市的科幻故事开头"}
        ]
        print("AI正在创作故事...")
        print("-" * 50)
        # 使用流式响应
        full_response = ""
        async for chunk in await client.chat_completion(
            messages=messages,
            model="Llama-2-7b-chat-hf",
            max_tokens=1000,
            temperature=0.9,  # 提高创意性
            stream=True
        ):
            if 'choices' in chunk and chunk['choices']:
                delta = chunk['choices'][0].get('delta', {})
                if 'content' in delta:
                    content = delta['content']
                    print(content, end='', flush=True)
                    full_response += content
        print("\\n" + "-" * 50)
        print(f"故事总长度: {len(full_response)} 字符")

asyncio.run(streaming_chat_example())
'''

LATENCY = '''
import asyncio
import time
from dynamo_client import DynamoClient

async def benchmark_latency():
    """延迟基准测试"""
    client = DynamoClient()
    # 预热请求
    await client.chat_completion(
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=10
    )
    # 测试不同长度的请求
    test_cases = [
        {"input_length": 50, "output_length": 100},
        {"input_length": 200, "output_length": 200},
        {"input_length": 500, "output_length": 300},
    ]
    for case in test_cases:
        input_text = "测试 " * case["input_length"]
        start_time = time.time()
        response = await client.chat_completion(
            messages=[{"role": "user", "content": input_text}],
            max_tokens=case["output_length"]
        )
        end_time = time.time()
        latency = end_time - start_time
        tokens_generated = len(response['choices'][0]['message']['content'].split())
        throughput = tokens_generated / latency
        print(f"输入长度: {case['input_length']}, "
              f"输出长度: {case['output_length']}, "
              f"延迟: {latency:.2f}s, "
              f"吞吐量: {throughput:.2f} tokens/s")

# 运行基准测试
asyncio.run(benchmark_latency())
'''


@pytest.fixture
def url(start: Callable[..., Any], tiny_model: Path) -> str:
    names = [word for name in MODELS for word in ("--model-name", name)]
    return str(start("out=mock", tiny_model, "--speedup-ratio", "1000", *names).url)


def run(snippet: str, url: str) -> None:
    assert ADDRESS in snippet or "DynamoClient()" in snippet
    exec(compile(snippet.replace(ADDRESS, url), "snippet", "exec"), {"__name__": "__main__"})


def test_snippets(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(USAGE, url)
    out = capsys.readouterr().out
    assert "'status': 'healthy'" in out
    assert f"Available models: {list(MODELS)}" in out
    assert len(out.partition("流式响应:\n")[2].strip()) > 50

    run(BASIC, url)
    out = capsys.readouterr().out
    assert "服务状态: healthy" in out
    assert "代码示例: " in out

    run(STREAMING, url)
    total = int(capsys.readouterr().out.rpartition("故事总长度: ")[2].split()[0])
    assert total > 100

    monkeypatch.setattr(dynamo_client.client, "DynamoConfig", lambda: DynamoConfig(url))
    run(LATENCY, url)
    assert capsys.readouterr().out.count("tokens/s") == 3


def test_the_page_about_the_client(
    mock_deployment: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "client.md"
    blocks = page.read_text().split("```python\n")[1:]
    monkeypatch.setattr(
        dynamo_client.sync, "DynamoConfig", lambda: DynamoConfig(mock_deployment.url)
    )
    assert len(blocks) == 2

    for block in blocks:
        source = block.partition("```")[0].replace(ADDRESS, mock_deployment.url)
        exec(compile(source, str(page), "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip()
