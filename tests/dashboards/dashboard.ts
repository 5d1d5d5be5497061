// What handoff.json must be, in the words of Grafana's own types. They describe objects in memory; in JSON an enum is its value.
import type { DataQuery } from '@grafana/schema';
import type { Dashboard, Panel, RowPanel, VariableModel } from '@grafana/schema/dist/types/raw/dashboard/x/dashboard_types.gen.d.ts';
import type { Options as StatOptions } from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen.d.ts';
import type { FieldConfig as StateTimelineFields, Options as StateTimelineOptions } from '@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.d.ts';
import type { Options as TableOptions } from '@grafana/schema/dist/types/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen.d.ts';
import type { FieldConfig as TimeSeriesFields, Options as TimeSeriesOptions } from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.d.ts';

type Json<T> = T extends string ? `${T}` : T extends (infer U)[] ? Json<U>[] : T extends object ? { [K in keyof T]: Json<T[K]> } : T;

interface Query extends DataQuery {
  datasource: { type: 'prometheus'; uid: '${datasource}' };
  editorMode: 'code';
  expr: string;
  format?: 'table';
  instant: boolean;
  legendFormat: string;
  range: boolean;
}

type Fields = NonNullable<Panel['fieldConfig']>;

// Panel leaves `options`, `custom` and `targets` open, for plugins: each kind of panel says what its own are.
interface PanelOf<Kind extends string, Options, Custom> extends Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> {
  type: Kind;
  options: Partial<Options>;
  fieldConfig: Omit<Fields, 'defaults'> & { defaults: Omit<Fields['defaults'], 'custom'> & { custom?: Custom } };
  targets: Query[];
}

type Kinds =
  | PanelOf<'stat', StatOptions, never>
  | PanelOf<'timeseries', TimeSeriesOptions, TimeSeriesFields>
  | PanelOf<'state-timeline', StateTimelineOptions, StateTimelineFields>
  | PanelOf<'table', TableOptions, never>
  | RowPanel;

export type Checked = Json<Omit<Dashboard, 'panels' | 'templating'> & { panels: Kinds[]; templating: { list: VariableModel[] } }>;
