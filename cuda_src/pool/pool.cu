// pool/pool.cu: y = max, mean or p-norm over windows of x[planes, d, h, w].
// Idea     : a thread VEC outputs, their window clipped to the input once; neighbours share cache lines.
// Inputs   : x, y T dense, three spatial axes (leading ones of size 1 where there are fewer).
//            CHANNELS_LAST: [n, d, h, w, channels], VEC neighbouring channels a thread, no indices.
// Outputs  : y; indices i64 (or null): position of the maximum in the whole of x, row-major, or
//            column-major within the plane where COLUMN_MAJOR. Of a window without an element y is LOWEST, or 0,
//            and the index `nowhere` from the plane's first element on.
// Macros   : T ACC VEC CHANNELS_LAST MODE (0 max, 1 mean, 2 p-norm); KD KH KW, SD SH SW, DD DH DW (dilation), PD PH PW
//            (padding before), ED EH EW (padding after; a mean leaves out what a negative one cuts off);
//            INCLUDE_PAD, COLUMN_MAJOR; LOWEST (`program.call.LOWEST`); CODES: the largest of 8-bit integers, channels
//            last, fewer than 2^31 vectors of 4 or more.
// Numerics : max propagates NaN, with indices or in double that of the first element; sums in ACC, row-major order.
// Bound    : HBM; L1 for overlapping windows.
#include "reduce/team.cuh"
#define TAPS (KD * KH * KW)
#ifndef CODES
#define CODES false
typedef T Word;  // what is loaded
constexpr int WORDS = VEC;
#else
typedef u32 Word;
constexpr int WORDS = VEC / 4;
#endif
constexpr bool SMALL = CHANNELS_LAST && TAPS <= 9, CUT = MODE == 1 && (ED < 0 || EH < 0 || EW < 0);

#if CODES  // of each 16 bits the larger
DEVICE u32 larger(u32 a, u32 b) { return (T)-1 < (T)0 ? __vmaxs2(a, b) : __vmaxu2(a, b); }
#endif

extern "C" __global__ void __launch_bounds__(256)
    pool(const T* x, T* y, i64* indices, i64 size, int channels, int d, int h, int w, int od, int oh, int ow,
         float p, i64 nowhere) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    const int vectors = CHANNELS_LAST ? channels / VEC : 1, step = CHANNELS_LAST ? channels : 1;
#if CODES  // a pair of 16 bits is compared by its upper bytes: those of odd places, and the others moved up
    const u32 q = (u32)i / vectors, line = q / ow, sheet = line / oh, plane = sheet / od;
    const int ox = q - line * ow, oy = line - sheet * oh, oz = sheet - plane * od;
    const i64 base = (i64)plane * d * h * w;
    const u32 least = (T)-1 < (T)0 ? 0x80008000u : 0;
    u32 odd[VEC / 4], even[VEC / 4];
    UNROLLED for (int j = 0; j < WORDS; j++) odd[j] = even[j] = least;
#else
    const i64 q = i / vectors;
    const int ox = q % ow, oy = q / ow % oh, oz = q / ((i64)ow * oh) % od;
    const i64 plane = q / ((i64)ow * oh * od), base = plane * d * h * w;
#endif
    const T* from = x + base * step + (CHANNELS_LAST ? i % vectors * VEC : 0);
    const int z0 = oz * SD - PD, y0 = oy * SH - PH, x0 = ox * SW - PW;
    ACC s[VEC];
    UNROLLED for (int j = 0; j < VEC; j++) s[j] = MODE ? (ACC)0 : -INFINITE;
    int count = 0;
    i64 best = -1;
    // a window may pass the padding where ceil_mode rounds up: that part never counts
    auto padded = [&](int z, int y, int x) { return z < d + ED && y < h + EH && x < w + EW; };
    auto inside = [&](int z, int y, int x) {
        return (unsigned)z < (unsigned)d && (unsigned)y < (unsigned)h && (unsigned)x < (unsigned)w &&
               (!CUT || padded(z, y, x));
    };
    auto element = [&](int z, int y, int x) { return ((i64)z * h + y) * w + x; };
    auto at = [&](int z, int y, int x) { return (const Word*)(from + element(z, y, x) * step); };
    auto take = [&](const Vec<Word, WORDS>& in, int iz, int iy, int ix) {
#if CODES
        UNROLLED for (int j = 0; j < WORDS; j++) {
            odd[j] = larger(odd[j], in.at[j]);
            even[j] = larger(even[j], in.at[j] << 8);
        }
        return;
#endif
        if (!INCLUDE_PAD) count++;
        const bool first = best < 0;
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC v = widen(in.at[j]);
            if (MODE == 1) s[j] += v;
            if (MODE == 2) s[j] += p == 2 ? v * v : p == 1 ? fabs(v) : pow(fabs(v), (ACC)p);
            if (MODE == 0 && (first || v > s[j] || (v != v && !indices && sizeof(ACC) < 8))) {
                s[j] = v;
                best = base + (COLUMN_MAJOR ? ((i64)ix * h + iy) * d + iz : element(iz, iy, ix));
            }
        }
    };
    if (SMALL) {  // all loads are on their way before the first is used
        Vec<Word, WORDS> in[SMALL ? TAPS : 1];
        UNROLLED for (int t = 0; t < TAPS; t++) {
            const int iz = z0 + t / (KH * KW) * DD, iy = y0 + t / KW % KH * DH, ix = x0 + t % KW * DW;
            if (inside(iz, iy, ix)) in[SMALL ? t : 0] = load<WORDS>(at(iz, iy, ix));
        }
        UNROLLED for (int t = 0; t < TAPS; t++) {
            const int iz = z0 + t / (KH * KW) * DD, iy = y0 + t / KW % KH * DH, ix = x0 + t % KW * DW;
            if (INCLUDE_PAD) count += padded(iz, iy, ix);
            if (inside(iz, iy, ix)) take(in[SMALL ? t : 0], iz, iy, ix);
        }
    } else
        for (int t = 0; t < TAPS; t++) {
            const int iz = z0 + t / (KH * KW) * DD, iy = y0 + t / KW % KH * DH, ix = x0 + t % KW * DW;
            if (INCLUDE_PAD) count += padded(iz, iy, ix);
            if (inside(iz, iy, ix)) take(load<WORDS>(at(iz, iy, ix)), iz, iy, ix);
        }
#if CODES
    Vec<Word, WORDS> codes;
    UNROLLED for (int j = 0; j < WORDS; j++) codes.at[j] = __byte_perm(even[j], odd[j], 0x7351);
    store<WORDS>((Word*)y + i * WORDS, codes);
    return;
#endif
    Vec<T, VEC> out;
    UNROLLED for (int j = 0; j < VEC; j++) {
        if (MODE == 0 && best < 0) s[j] = (ACC)LOWEST;
        if (MODE == 1) s[j] = count ? s[j] / count : (ACC)0;
        if (MODE == 2) s[j] = p == 2 ? sqrt(s[j]) : p == 1 ? s[j] : pow(s[j], 1 / (ACC)p);
        out.at[j] = narrow<T>(s[j]);
    }
    store<VEC>(y + i * VEC, out);
    if (indices) indices[i] = best < 0 ? base + nowhere : best;
}
