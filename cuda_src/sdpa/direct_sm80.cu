// sdpa/direct_sm80.cu: y = softmax(scale q k^T + mask) v of few keys in 16-bit floats, mma.sync.
// Idea     : short sequences are a chain of latencies, of which the loads are the longest. TILES x 16 rows
//            of queries a block; SHARERS warps share the keys of a tile, 16 in turn, with q, k and v
//            straight from memory in the registers that multiply: nothing is staged, and no thread waits
//            for another's loads. The order of the numbers in a sum over d is free where both operands
//            have the same, and so is that of the columns of v: a lane takes 16 bytes at once. The
//            sharers' results meet at the end.
// Inputs   : operands.cuh with D = DV = 64, rows of 16-byte aligned pieces, one mask at most.
// Outputs  : y T; lse f32 (or null).
// Macros   : operands.cuh's (MASK 2: one row serves every query), MASK_PIECES (pairs of a mask's elements
//            are aligned neighbours), TILES, SHARERS, CHUNKS (of 16 keys a warp: 16 SHARERS CHUNKS at most), GROUPED
//            (heads of queries share a head of keys).
// Launch   : grid (rows of 16 TILES queries, heads, batch), 32 SHARERS TILES threads.
// Numerics : f32 accumulate; probabilities rounded to T as operands; bits depend on SHARERS alone.
// Bound    : a load's latency, and the bytes of k and v that each block reads.
#include "sm80.cuh"
#include "sdpa/operands.cuh"

constexpr int STRIDE = 16 * SHARERS, TEAM = 32 * SHARERS, THREADS = TEAM * TILES;
static_assert(D == 64 && DV == 64 && STRIDE * 8 % TEAM == 0, "a quad of lanes holds 64 numbers of a row");

DEVICE uint4 load_16(const u8* from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}
// The bytes `row` strides on from some elements.
DEVICE const u8* along(const T* from, int row, int stride) {
    u64 at;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(stride * 2), "l"(from));
    return (const u8*)at;
}
// Element j of two rows, as an operand holds neighbours of k.
DEVICE u32 pair(const uint4& row, const uint4& next, int j) {
    return __byte_perm(((const u32*)&row)[j / 2], ((const u32*)&next)[j / 2], j % 2 ? 0x7632 : 0x5410);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sdpa_direct(OPERANDS, T* y, float* lse, i64 yb, i64 yh, i64 yr) {
#if PACKED
    after_previous_launch();  // which may have made the offsets
#endif
    GATHER
    if (PACKED && (int)blockIdx.x * TILES * 16 >= o.queries) return;
    // a warp's sums: of 8 tiles of 8 columns of v, as the lanes hold them; each row's (top, sum)
    __shared__ float4 shares[TILES][SHARERS][8][32];
    __shared__ float start;
    __shared__ float2 tops[TILES][SHARERS][16];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4, quad = lane % 4;
    const int sharer = warp % SHARERS, team = warp / SHARERS, first = (blockIdx.x * TILES + team) * 16;
    const int h = blockIdx.y, b = blockIdx.z, kv = GROUPED ? h / o.group : h, row = first + line;
    const int last = o.keys - 1, key = sharer * 16;
    const T* q_at = o.q + b * o.qs.batch + h * o.qs.head + quad * 8;
    const T* k_at = o.k + b * o.ks.batch + kv * o.ks.head + quad * 8;
    const T* v_at = o.v + b * o.vs.batch + kv * o.vs.head + line * 8;
    const int q_row = o.qs.row, k_row = o.ks.row, v_row = o.vs.row;
    constexpr int MOST = CHUNKS > 1 ? 2 : 1;  // chunks at once
    const u8 *q_rows[2], *k_rows[2 * MOST], *v_rows[4 * MOST];
    const T* mask_at[2];
    UNROLLED for (int i = 0; i < 2; i++) {
        q_rows[i] = along(q_at, min(row + i * 8, o.queries - 1), q_row);
        mask_at[i] = MASK ? mask_row(o, o.mask, b, h, MASK == 2 ? 0 : row + i * 8) : o.q;
    }
    auto find_rows = [&](int from) {
        UNROLLED for (int i = 0; i < 2 * MOST; i++)
            k_rows[i] = along(k_at, min(from + i / 2 * STRIDE + i % 2 * 8 + line, last), k_row);
        UNROLLED for (int i = 0; i < 4 * MOST; i++)
            v_rows[i] = along(v_at, min(from + i / 4 * STRIDE + i % 4 / 2 * 8 + i % 2 + quad * 2, last), v_row);
    };
    find_rows(key);
    // Addresses are worked out before the wait: ptxas, which would begin with that, moves nothing across an exit.
    u64 any = (u64)q_rows[0] | (u64)q_rows[1] | (u64)mask_at[0] | (u64)mask_at[1];
    UNROLLED for (int i = 0; i < 4 * MOST; i++) any |= (u64)k_rows[i / 2] | (u64)v_rows[i];
    if (any == 0) return;
    after_previous_launch();

    uint4 qs[2][2];  // 8 neighbours of the lower half of a row, and 8 of the upper
    UNROLLED for (int i = 0; i < 4; i++) qs[i / 2][i % 2] = load_16(q_rows[i / 2] + i % 2 * 64);
    u32 queries[4][4];
    // The 0 at which the first products begin comes from shared memory, behind a barrier and so behind all
    // loads: ptxas would put those of v off until the first products have left their registers.
    if (threadIdx.x == 0) start = 0;
    float zero;
    float acc[8][4] = {}, top[2], sum[2] = {};
    top[0] = top[1] = NEGATIVE_INFINITY;
    const float scale = o.scale * LOG2E;  // logits in units of log 2, if not NATURAL
    constexpr float UNIT = NATURAL ? LOG2E : 1.0f;
    UNROLLED for (int i0 = 0; i0 < CHUNKS; i0 += 2) {
        if (i0) find_rows(key + i0 * STRIDE);
        uint4 ks[MOST][2][2], vs[MOST][4];
        float masks[MASK ? MOST : 1][MASK == 1 ? 2 : 1][2][2] = {};
        UNROLLED for (int i = 0; i < 4 * MOST; i++) ks[i / 4][i / 2 % 2][i % 2] = load_16(k_rows[i / 2] + i % 2 * 64);
        UNROLLED for (int i = 0; i < 4 * MOST; i++) vs[i / 4][i % 4] = load_16(v_rows[i]);
        if (MASK)
            UNROLLED for (int i = 0; i < 2 * MOST; i++)
                UNROLLED for (int j = 0; j < (MASK == 1 ? 2 : 1); j++) {
                    const int at = key + (i0 + i / 2) * STRIDE + i % 2 * 8 + quad * 2;
                    float(&m)[2] = masks[MASK ? i / 2 : 0][MASK == 1 ? j : 0][i % 2];
#if MASK_PIECES
                    const float2 both = unpack2<T>(*(const u32*)(mask_at[j] + min(at, last - 1)));
                    m[0] = both.x, m[1] = both.y;
#else
                    UNROLLED for (int e = 0; e < 2; e++)
                        m[e] = to_float(*(const T*)along(mask_at[j], min(at + e, last), o.mask.column));
#endif
                    if (!KEEP) m[0] = meant(m[0], o.floor), m[1] = meant(m[1], o.floor);
                }
        if (i0 == 0) {
            __syncthreads();
            zero = *(volatile float*)&start;
            UNROLLED for (int i = 0; i < 16; i++) {
                queries[i / 4][i % 4] = ((const u32*)&qs[i % 2][i / 8])[i / 4 % 2 * 2 + i % 4 / 2];
                asm volatile("" : "+r"(queries[i / 4][i % 4]));  // once, in registers side by side
            }
        }
        float p[2 * MOST][4];
        UNROLLED for (int i = 0; i < 2 * MOST; i++) {
            float(&s)[4] = p[i];
            s[0] = s[1] = s[2] = s[3] = i0 ? 0.0f : zero;
            UNROLLED for (int d = 0; d < 4; d++)
                mma(s, queries[d], (const u32*)&ks[i / 2][i % 2][d / 2] + d % 2 * 2, T());
            UNROLLED for (int e = 0; e < 4; e++) {
                const float m = masks[MASK ? i / 2 : 0][MASK == 1 ? e / 2 : 0][i % 2][e % 2];
                if (!NATURAL) s[e] *= scale;
                else if (KEEP || SOFTCAP || !MASK) s[e] = logit(o, s[e], m, 0.0f);
                else s[e] = s[e] * o.scale + m;  // which `meant` has been asked about
            }
        }
        const int end = CAUSAL ? min(o.keys, first + 1) : o.keys;  // the keys that all rows see
        if (key + (i0 + MOST - 1) * STRIDE + 16 > end)
            UNROLLED for (int i = 0; i < 8 * MOST; i++) {
                const int at = key + (i0 + i / 8) * STRIDE + i / 4 % 2 * 8 + quad * 2 + i % 2;
                if (!meet(o, row + i % 4 / 2 * 8, at)) p[i / 4][i % 4] = NEGATIVE_INFINITY;
            }
        UNROLLED for (int i = 0; i < 2; i++) {
            float now = top[i], part = 0;
            UNROLLED for (int n = 0; n < 2 * MOST; n++) now = fmaxf(now, fmaxf(p[n][2 * i], p[n][2 * i + 1]));
            now = quad_max(now);
            const float zero = safe(now), fade = power2((top[i] - zero) * UNIT);
            top[i] = now;
            UNROLLED for (int n = 0; n < 2 * MOST; n++)
                UNROLLED for (int e = 2 * i; e < 2 * i + 2; e++) part += p[n][e] = power2((p[n][e] - zero) * UNIT);
            sum[i] = i0 ? sum[i] * fade + part : part;
            if (i0)
                UNROLLED for (int n = 0; n < 8; n++) acc[n][2 * i] *= fade, acc[n][2 * i + 1] *= fade;
        }
        if (key + (i0 + MOST - 1) * STRIDE + 16 > o.keys)  // a weight of 0 is to meet no NaN
            UNROLLED for (int i = 0; i < 4 * MOST; i++)
                if (key + (i0 + i / 4) * STRIDE + i % 4 / 2 * 8 + i % 2 + quad * 2 > last) vs[i / 4][i % 4] = uint4{};
        UNROLLED for (int i = 0; i < MOST; i++) {
            u32 a[4];
            UNROLLED for (int e = 0; e < 4; e++)
                a[e] = pack2<T>(p[2 * i + e / 2][e % 2 * 2], p[2 * i + e / 2][e % 2 * 2 + 1]);
            UNROLLED for (int n = 0; n < 8; n++) {  // column 8 l + n of v is column l of tile n
                const u32 at[2] = {pair(vs[i][0], vs[i][1], n), pair(vs[i][2], vs[i][3], n)};
                mma(acc[n], a, at, T());
            }
        }
    }

    UNROLLED for (int n = 0; n < 8; n++)
        shares[team][sharer][n][lane] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
    UNROLLED for (int i = 0; i < 2; i++) {
        sum[i] = quad_sum(sum[i]);
        if (quad == 0) tops[team][sharer][line + 8 * i] = make_float2(top[i], sum[i]);
    }
    __syncthreads();
    // a thread merges 8 neighbours of a row: of every tile, the same number of the same lane
    UNROLLED for (int i = 0; i < 128 / TEAM + (TEAM > 128); i++) {
        const int at = threadIdx.x % TEAM + i * TEAM, r = at / 16 + at / 2 % 2 * 8, c = (at / 4 % 4 * 2 + at % 2) * 8;
        if (TEAM > 128 && at >= 128) break;
        float best = NEGATIVE_INFINITY, total = 0, value[8] = {};
        UNROLLED for (int j = 0; j < SHARERS; j++) best = fmaxf(best, tops[team][j][r].x);
        UNROLLED for (int j = 0; j < SHARERS; j++) {
            const float2 of = tops[team][j][r];
            const float part = power2((of.x - safe(best)) * UNIT);
            const float* from = (const float*)shares[team][j] + at;
            total += part * of.y;
            UNROLLED for (int n = 0; n < 8; n++) value[n] += part * from[n * 128];
        }
        const int out = first + r;
        if (out >= o.queries) continue;
        if (lse && c == 0)
            ((float2*)lse)[first_row(o, b, h, o.heads, o.queries) + out] = row_lse(NATURAL ? best : best * (1 / LOG2E), total);
        const float factor = GUARD && total == 0 ? 0.0f : __fdividef(1.0f, total);
        T* to = y + b * yb + h * yh + (BEGIN + out) * yr + c;
        *(uint4*)to = {pack2<T>(value[0] * factor, value[1] * factor), pack2<T>(value[2] * factor, value[3] * factor),
                       pack2<T>(value[4] * factor, value[5] * factor), pack2<T>(value[6] * factor, value[7] * factor)};
        for (int j = 0; is_dead(total) && j < 8; j++)
            to[j] = from_float<T>(nothing(o.v + b * o.vs.batch + kv * o.vs.head + c + j, o.vs.row, o.keys));
    }
}
